// What one training forward of an attached model leaves behind, and what its backward brings.
// A Pass is owned by the graph: its uses hold it, it holds none of them, so a forward that meets no backward vanishes
// with its graph. Parameters are known by their place in the probe's table, never by identity: wrappers swap the
// objects.
#pragma once

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace torchgradx {

namespace py = pybind11;
using at::Tensor;
using torch::autograd::Node;
using NodePtr =
    std::decay_t<decltype(std::declval<const Tensor&>().grad_fn())>;  // shared or intrusive: torch changed it

class TapeEntry;
class Pass;
struct Segments;

template <class Values, class Value>
bool contains(const Values& values, const Value& value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

// Python objects that the graph may drop from any thread.
struct Callback {
  py::object function;
  ~Callback() {
    if (!function) return;
    if (!Py_IsInitialized()) {  // a pass that an interrupt left outlives the interpreter
      function.release();
      return;
    }
    py::gil_scoped_acquire gil;
    function = py::object();
  }
};

// Of a tensor that is kept though others may write into it: whether they did.
struct Version {
  c10::VariableVersion writes;
  uint32_t then = 0;
  Version() = default;
  explicit Version(const Tensor& t) {
    const auto& counter = t.defined() ? t.unsafeGetTensorImpl()->version_counter() : writes;
    if (counter.enabled()) writes = counter, then = counter.current_version();  // no inference tensor
  }
  bool stands() const {
    return !writes.enabled() || writes.current_version() == then;
  }
};

// One contribution of one use to one parameter: operands of an outer product, or the per-sample gradient itself.
struct Term {
  int64_t site;        // place in the probe's table of sites; -1: of no module, as those of a plain Linear
  Tensor activations;  // samples in front; undefined: `grads` holds gradients by sample
  Tensor grads;
  std::array<Version, 2> kept = {};              // what activations and grads may be views of
  std::shared_ptr<Segments> segments = nullptr;  // then: of rows [rows, *]
};

using Slot = std::pair<int64_t, Tensor>;  // a parameter's place in the table, and the tensor that stands there now

struct Entry {                   // one parameter within one pass
  int64_t calls = 0, parts = 0;  // parts: final, of one whose rows are used apart
  Tensor sq_norms;               // once final: [N], or [*, N] of which `row` counts
  int64_t row = 0;
  std::vector<Term> terms;
  bool late = false;  // a use arrived after the norm was final

  Tensor final() const {
    return sq_norms.dim() > 1 ? sq_norms[row] : sq_norms;
  }
};

// The node that receives each parameter's gradient. Passes share one until a parameter is exchanged.
struct Owners {
  std::vector<NodePtr> of;  // by parameter; null where none is received
  std::unordered_map<const Node*, int64_t> parameter;
  std::vector<NodePtr> former;  // exchanged within a forward: keep the keys above alive
};

using Refusal = std::pair<int64_t, std::string>;  // (site, cause): torchgradx/refusals.py

using OnTape = std::variant<std::shared_ptr<TapeEntry>, std::shared_ptr<Callback>>;  // a use, or Python's own

struct Tally {                   // of what a backward adds to the record besides norms
  std::vector<int64_t> balance;  // graph edges into each parameter, minus recorded uses: anything but 0 is unaccounted
  std::vector<Refusal> refusals;
  void refuse(const Refusal& refusal);  // once
  void add(const Tally& more);
};

struct Stretch {  // of the graph nodes made on a thread, by sequence number
  uint64_t thread, first, last;
  bool holds(const Node& node) const;
};

// What all passes of one probe share.
class Recorder : public std::enable_shared_from_this<Recorder> {
 public:
  Recorder(int64_t parameters, py::object began, py::object finish, py::object drained, py::object site_called,
           py::object received, py::object called_directly);

  void enlist(const std::shared_ptr<Pass>& pass);
  void push(std::shared_ptr<Pass> pass);  // enlisted; nullptr: record nothing on this thread until pop()
  void pop();
  int64_t depth() const;  // how many are in force on this thread, one within another
  // The pass of this thread; in a recomputation, the one that it belongs to; outside of the model's forward, one
  // with called_directly set.
  std::shared_ptr<Pass> current() const;

  // The record: everything since it was last cleared. What a backward adds counts apart until it has ended, for one
  // that fails leaves nothing behind: torchgradx/record/backwards.py.
  void open(int64_t task);
  void merge(const std::vector<int64_t>& tasks);  // they have ended: with what came outside of any, -1
  void drop(const std::vector<int64_t>& tasks);
  void count(int64_t task, int64_t parameter, int64_t edges);  // under the mutex
  Tally whole() const;                                         // of all backwards
  void refuse(int64_t site, const std::string& cause);
  void refuse_locked(int64_t site, const std::string& cause);  // under the mutex, in a backward that has been opened
  void clear();

  // The audit of a new structure: the sum of what is recorded, to be held against what a parameter receives.
  bool auditing = false;
  bool audited(int64_t task) const;  // whether a backward met a pass; of the latest few
  bool audit(int64_t task);          // under the mutex; false: it was
  void add_recorded(int64_t parameter, const Tensor& gradient, double magnitude);
  std::pair<std::optional<Tensor>, double> take_recorded(int64_t task, int64_t parameter);
  // Backwards, and parameters of which something is recorded that these did not receive.
  std::vector<std::pair<int64_t, int64_t>> untaken(const std::vector<int64_t>& tasks) const;

  bool keeps_tape = false;  // clipping: uses are kept as they arrive
  bool shields = false;     // norms only: what a recorded backward brings leaves .grad as it was
  void put_gate(int64_t parameter, const NodePtr& node);

  // Uses whose saved tensors went through hooks (checkpointing): their layers must stay as they are until they die.
  void hold();
  void release();
  int64_t held() const {
    return held_;
  }

  std::vector<std::shared_ptr<Pass>> living() const;

  const int64_t parameters;
  // Whoever waits for it may hold Python's lock, which the last reference to a tensor asks for: no tensor is made or
  // dropped under it, and no pass.
  mutable std::mutex mutex;
  bool asking() const;  // nothing arrives in this thread: it asks a node for its products
  void set_asking(bool on);
  std::shared_ptr<const Owners> owners() const;  // of the latest pass
  void set_owners(std::shared_ptr<const Owners> latest);
  const Callback began, finish, drained, site_called, received, called_directly;

 private:
  // The sum, how large its terms were, and whether somebody wrote into it: a single term is on its way to be .grad.
  struct Recorded {
    Tensor sum;
    double size = 0;
    Version version;
    bool changed = false;
    bool stands() const {
      return !changed && version.stands();
    }
  };
  std::map<std::pair<int64_t, int64_t>, Recorded> recorded_;  // by backward, as threads run theirs, and by parameter
  std::vector<int64_t> audited_;
  std::vector<std::weak_ptr<Pass>> alive_;
  std::shared_ptr<const Owners> owners_;
  std::atomic<int64_t> held_{0};
  const Stretch before_;             // there was a probe
  std::vector<Stretch> unrecorded_;  // by the latest forwards of the root that made nodes and no pass
  // The pass whose forward made a node; nullptr: one that was not recorded here; nothing: not known.
  std::optional<std::shared_ptr<Pass>> original(const Node& node) const;
  // The same of its own forwards, and within a backward that has asked for one of these.
  std::optional<std::shared_ptr<Pass>> own(const Node& node) const;
  void remember(const std::shared_ptr<Pass>& pass) const;
  std::map<int64_t, Tally> tallies_;  // by backward
  Tally& tally(int64_t task);
};

class Pass : public std::enable_shared_from_this<Pass> {
 public:
  Pass(std::shared_ptr<Recorder> recorder, int64_t n, const std::vector<Tensor>& parameters);

  const std::shared_ptr<Recorder> recorder;
  const int64_t n;
  bool wide = false;                  // a trainable parameter is float64
  std::vector<int64_t> trainable;     // parameters, when the forward began
  std::vector<int64_t> hooked;        // norms only: parameters that get their gradient all the same, for hooks on them
  bool called_directly = false;       // of a module called outside of the model's own forward: refused when read
  bool recorded = false;              // it is part of the record
  bool keep = false;                  // more forwards of the same samples may come: finish nothing before it is read
  bool create_graph = false;          // seen in backward; refused when read
  bool retained = false;              // a backward kept its graph: another may come
  bool in_graph = false;              // its uses are those of a compiled graph, whose edges say nothing
  std::unique_ptr<Callback> outside;  // then: calls its model again, without the compiler
  bool silent = false;                // some calls were under no_grad: a reentrant checkpoint runs them again
  uint64_t structure = 0;             // hash of the uses: which, and which of their sizes equal N
  int64_t serial = 0;                 // its place among the forwards
  std::vector<Refusal> refusals;      // they count once a backward comes
  std::vector<int64_t> layouts;       // by use, once proven; empty: as declared, or batch first
  std::vector<std::shared_ptr<Segments>> segments;  // of rows: where a layout is kSegments + their place
  std::vector<Stretch> made;                        // by its forwards: what runs again from there is its own
  std::vector<Entry> entries;
  std::vector<std::optional<Tensor>> directions;  // by parameter; none, or empty: no products with it
  Tensor dots;                                    // [N] in float64, of what has arrived; undefined before
  void add_dots(const Tensor& dots);
  void keep_on_tape(OnTape use);
  std::vector<OnTape> take_tape();

  struct Use {
    int64_t site;
    at::DimVector sizes;  // of what the site looks at to find the samples
    int64_t rows;         // that these may count
    NodePtr node;         // that made the output
    uint32_t output_nr;
  };
  std::vector<Use> uses;  // only while a forward runs, since the nodes own this pass
  void forget_uses();

  // Forward: counts a use of these parameters; returns its place, or -1 in a recomputation.
  int64_t call(int64_t site, const std::vector<Slot>& slots, at::IntArrayRef sizes,
               const std::vector<Tensor>& given = {});
  void expect(int64_t parameter, const Tensor& tensor);  // one more use of it, which is no module's
  void note(int64_t fact);                               // that its structure depends on
  void watch(int64_t use, const Tensor& output);
  // Nodes made since `first` on this thread belong to a module that is run again whole: its uses of these need no
  // counting.
  void enclose(const std::vector<int64_t>& parameters, uint64_t first);
  // In what was made since `first` they are served at the graph's nodes: count them again.
  void disclose(const std::vector<int64_t>& parameters, uint64_t first);
  // The nodes between some parameters and where samples come in: only these may give those inside (true) a gradient,
  // else the sites that they serve are refused.
  void guard(const std::vector<std::pair<const Node*, bool>>& nodes, std::vector<int64_t> sites);
  int64_t place_of(const Node& node) const;  // in the table, of a parameter's; -1: of another node
  // Backward: a use's gradient is here, at this node of the graph. False where this backward computes none of the
  // parameters' gradients.
  bool arrive(at::IntArrayRef parameters, const Node* at, bool enclosed = false);
  bool reaches(at::IntArrayRef parameters) const;  // whether the graph that this backward runs has any of them
  static bool compiled(const Node& node);  // the backward of a whole graph: an edge for each parameter, used as may be
  // Whether the operands must be kept until all uses are in; `parts` of its rows, used once each, need no cross terms.
  bool waits(int64_t parameter, int64_t parts = 1);
  void add(int64_t parameter, Term term);
  void finish(int64_t parameter, const Tensor& sq_norms, int64_t row = 0, int64_t parts = 1);
  // [N] in float64: the squared norms of some parameters, or of all, together, as far as they are final.
  Tensor total(const std::optional<std::vector<int64_t>>& parameters) const;
  std::vector<int64_t> waiting() const;  // parameters whose uses are not combined yet
  std::vector<int64_t> late() const;
  std::vector<int64_t> changed() const;  // of those waiting: what is kept was written into
  void clear();

  struct State {  // of what backwards bring
    std::vector<Entry> entries;
    std::vector<OnTape> tape;
    Tensor dots;
    bool create_graph, retained;
  };
  State state() const;
  void restore(const State& state);
  void forget();  // the only backward that came to it failed

 private:
  std::atomic<int64_t> task_{-1};  // the latest backward that came to it
  std::vector<OnTape> tape_;       // under the recorder's mutex
  void enter(int64_t task, const Node* at);
  int64_t forgotten_ = 0;  // uses of earlier forwards of the same samples
  // False: its gradient is another parameter's.
  bool track(int64_t parameter, const Tensor& tensor);
  using OnDevices = std::unordered_map<c10::Device, std::vector<const Entry*>>;  // what is no float32 of a CPU
  void add_to(Tensor& total, OnDevices& elsewhere, const Entry& entry) const;
  bool needed(int64_t parameter) const;
  void audit_edges(const Node* at, const std::vector<std::shared_ptr<Pass>>& passes);
  bool encloses(const Node& node, int64_t parameter) const;
  struct Guarded {
    uint64_t sequence_nr;  // no other node has this at its address
    bool inside;
  };
  std::unordered_map<const Node*, Guarded> guarded_;
  std::vector<int64_t> guards_;  // sites
  const Guarded* guarded(const Node& node) const;
  void audit_guarded(const std::vector<const Node*>& nodes, const std::vector<const Node*>& roots) const;
  // How many uses ago as many rows were met: with a padding that is taken out, there are fewer.
  int64_t ago(int64_t rows) const;
  struct Span {
    Stretch made;
    std::vector<int64_t> parameters;
  };
  std::vector<Span> spans_;
  std::shared_ptr<const Owners> owners_;
};

bool watching();  // whether the operators of this thread are observed: watch.cpp

}  // namespace torchgradx
