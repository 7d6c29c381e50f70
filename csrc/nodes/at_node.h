// Nodes of the framework's at which the extension serves parameters by itself: at_node.cpp.
#pragma once

#include "../record/pass.h"

namespace torchgradx {

// A pass's answer whether a backward wants squared norms alone, or the samples' gradients beside them, for clipping.
// Python says it once, when the first gradient is there.
struct Terms {
  enum Wants : int64_t { kElse, kSquares, kGradients };
  Callback ask, otherwise;  // otherwise(station, incoming)
  std::atomic<int64_t> task{-1}, wants{kElse};
  Terms(py::object ask, py::object otherwise) : ask{std::move(ask)}, otherwise{std::move(otherwise)} {}
};

struct Stop {             // a node of a trail whose operands are parameters alone, see torchgradx/shared/stations.py
  int64_t node, station;  // its number in an Outline; in the trail
  bool sequence;
  std::map<int64_t, std::array<int64_t, 2>> leaves;  // by operand: the parameter, how many edges are counted
};

struct Trail {
  std::vector<std::pair<int64_t, bool>> guarded;  // numbers in an Outline; inside, see Pass::guard
  std::vector<Stop> stops;
};

bool can_serve(const Node& node, const Stop& stop);  // one of these kinds, that saved nothing through hooks
void serve_at(Node& node, std::shared_ptr<Pass> pass, std::shared_ptr<const Stop> stop, std::shared_ptr<Terms> terms);

}  // namespace torchgradx
