// One module of an attached model: where its parameters stand in the probe's table, its layer, and what is done with a
// use.
#pragma once

#include "../layers/layer.h"
#include "../layers/recurrence.h"
#include "../record/pass.h"
#include "segments.h"

#include <map>

namespace torchgradx {

struct Rows {  // of a parameter, that a layer uses: between so many others, one of the parts that a module uses apart
  int64_t before = 0, after = 0, parts = 1;
};

// Zeros in place of the rows that another part of the module uses.
Tensor among(const Tensor& t, const Rows& rows, int64_t dim);

struct Site {
  std::shared_ptr<Recorder> recorder;
  int64_t index;
  int64_t weight, bias;  // places in the table of parameters, -1 where there is none
  Rows weight_rows, bias_rows;
  bool weight_grad;                   // false: norms only
  bool taps;                          // its forward and its gradients stay the framework's own
  Layout layout;                      // as declared
  Layout presumed = Layout::kBatch;   // where nothing is declared or proven
  std::unique_ptr<Callback> planner;  // (N, T, bytes of an operand's element) -> Algorithm; asked once a size
  LayerPtr layer;

  bool apart() const {  // its module's edges into these parameters are counted by none, see Pass::enclose
    return weight_rows.parts > 1 || bias_rows.parts > 1;
  }
  Layout layout_of(const Pass& pass, int64_t use) const;
  std::shared_ptr<Segments> segments_of(const Pass& pass, int64_t use) const;  // nullptr: another layout
  // Operands with the samples in front; nothing, and a refusal in the record, where they cannot be found.
  std::optional<Operands> operands(const Pass& pass, int64_t use, const Saved& saved, const Tensor& grad_output) const;

  Algorithm plan(int64_t n, int64_t t, const Tensor& operand);

 private:
  std::map<std::array<int64_t, 3>, Algorithm> plans_;
  std::mutex plans_mutex_;
};

// One call of a module in a forward, owned by the graph.
struct Use : torch::CustomClassHolder {
  std::shared_ptr<Site> site;
  std::shared_ptr<Pass> pass;
  int64_t index;
  bool wants_weight, wants_bias;
  bool held;     // its saved tensors go through hooks
  bool borrows;  // its tensors' memory is written into again: in a compiled graph, or by who has .grad

  Use(std::shared_ptr<Site> site, std::shared_ptr<Pass> pass, int64_t index, bool wants_weight, bool wants_bias);
  ~Use() override;

  c10::SmallVector<int64_t, 2> parameters() const;
  bool arrive(const Node* at) const;  // whether to record what comes to this node
  // Whether nobody asks for its operands, of T positions: gradients and norms from one pass are all there is to it.
  bool fuses_alone(int64_t positions, const Tensor& operand) const;
  void finish(const Tensor& sq_norms);  // [1 + bias, N], that a fused pass made
  bool receives() const;                // whether its parameters are to get their gradients
  // Norms beside the framework's own gradient, or operands kept for the other uses of the same parameters; `received`:
  // the parameters get that gradient.
  void record(Saved saved, const Tensor& weight, const Tensor& grad_output, bool received);
  // What is wanted; and the norms, where the pass has met this gradient (`recorded`).
  Gradients gradients(const Saved& saved, const Tensor& weight, const Tensor& grad_output, Wanted wanted,
                      bool recorded);

 private:
  void audit(const Operands& operands, const Gradients& gradients, const Tensor& grad_output);
  // What else the pass asks of a use: to be kept for clipping, and the products with its directions. `gradients`: the
  // samples' own, kept in place of the operands where they are there.
  void serve(const Operands& operands, const Saved& saved, const Tensor& weight, const Tensor& grad_output,
             const Tensor& gradients = {});
  bool keeps_gradients(const Operands& operands) const;
  // [N, *]: sums over a sample's images [N K, *], or its rows, in the wider type
  Tensor by_sample(const Tensor& t, int64_t images) const;
  // Serves rows that are not n*T+t: segments.cpp.
  std::optional<Gradients> fuse_segments(const Segments& segments, const Saved& saved, const Tensor& weight,
                                         const Tensor& grad_output);  // or nothing, where no kernel makes both
  Tensor norms_of_runs(const Segments& segments, const FlatUse& sorted, const Tensor& weight, bool bias,
                       Gradients* gradients) const;
  bool fuses_runs(const Segments& segments, const Tensor& grad_output) const;
  bool fuses_at_once(const Segments& segments, const Tensor& grad_output) const;
  Algorithm plan_of_run(int64_t count, int64_t length, const Tensor& operand) const;
  bool waits_for_weight() const;
  bool waits_for_bias() const;
};

// A use kept for clipping, which asks for its parameters' gradients once more.
class TapeEntry {
 public:
  TapeEntry(const Use& use, const Saved& saved, const Tensor& weight, const Tensor& grad_output,
            const Tensor& gradients);
  TapeEntry(int64_t parameter, Tensor gradients);  // [N, P, C] in the wider type, at a node of the framework's
  at::IntArrayRef parameters() const {
    return parameters_;
  }
  bool intact() const;  // what it keeps is as it was
  // The sums of these, all or some of its parameters, over the samples, each times its factor [N]. Those of factor 0
  // are left out.
  std::vector<Tensor> weighted(const Tensor& factors, const std::vector<int64_t>& parameters) const;

 private:
  std::shared_ptr<Site> site_;
  Layout layout_ = Layout::kBatch;
  std::shared_ptr<Segments> segments_;
  c10::SmallVector<int64_t, 2> parameters_;
  Saved saved_;
  Tensor weight_, grad_output_;
  Tensor gradients_;                 // of each sample, in place of saved_ and grad_output_; or undefined
  std::array<Version, 2> versions_;  // of what it keeps
};

// As autocast does for the framework's own layers, the weight's cast being cached for the region.
Tensor cast(const Tensor& t);

// A use of `site` on this thread, or nothing where the plain layer should run. `sizes` to be told in place of the
// input's, whose first dimension may count something else than rows.
c10::intrusive_ptr<Use> begin_use(const std::shared_ptr<Site>& site, const Tensor& input, const Tensor& weight,
                                  const std::optional<Tensor>& bias, at::OptionalIntArrayRef sizes = std::nullopt);

// A use by a compiled graph.
c10::intrusive_ptr<Use> use_in_graph(const std::shared_ptr<Site>& site, const std::shared_ptr<Pass>& pass,
                                     const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias);

// What is a view of what a node gave, as a tensor of its own: so are the framework's outputs, and what may not be done
// to views (detach_()) may be done to those.
Tensor of_its_own(const Tensor& t);

// The layer's forward, with a backward that also records; undefined where there is nothing to record, and the
// framework's own is to run: as it does once the probe has left.
Tensor call(const std::shared_ptr<Site>& site, const Tensor& input, const Tensor& weight,
            const std::optional<Tensor>& bias);
// A layer of a recurrent module likewise. A site for each W_ih, W_hh and W_hr, direction by direction.
struct Gathered {  // by a backward: by site, what its weight met and the gradient there, [N, T, I] and [N, T, O]
  std::vector<std::optional<std::pair<Tensor, Tensor>>> operands;
};
Output call_recurrent(const std::vector<std::shared_ptr<Site>>& sites, const Recurrence& of,
                      Sequence in,                                       // whose states may be undefined: zeros
                      const std::shared_ptr<Gathered>& into = nullptr);  // in place of sites
// The framework's own, listened at, of a layer that is whole; undefined where Python has to call it.
Tensor call_tapped(const std::shared_ptr<Site>& site, const Tensor& input, const Tensor& weight,
                   const std::optional<Tensor>& bias);
// Listens at the output of the framework's own layer.
void listen(const c10::intrusive_ptr<Use>& use, const Saved& saved, const Tensor& weight, const Tensor& output);
void tap(const std::shared_ptr<Site>& site, const Saved& saved, const Tensor& weight, const std::optional<Tensor>& bias,
         const Tensor& output);

}  // namespace torchgradx
