// Sizes of operands, for kernels that know nothing of torch.
#pragma once

#include <cstdint>

namespace torchgradx {

struct RowShape {  // activations [N, T, I], grad_output [N, T, O]
  int64_t N, T, I, O;
};

struct ConvShape {  // input [N, C, H, W], grad_output [N, O, outH, outW], weight [O, C / groups, kH, kW]
  int64_t N, C, H, W, O, outH, outW, kH, kW, strideH, strideW, padH, padW, dilationH, dilationW, groups;
};

}  // namespace torchgradx
