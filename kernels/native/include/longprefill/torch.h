// What every translation unit with operators needs of torch, and no more: the full extension header costs half a minute.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "longprefill/vector.h"

// The operators of one instruction set are torch.ops.longprefill_<isa>: the namespace comes from the build's flags.
// Use: LONGPREFILL_OPS(kda, m) { m.def("kda_scan(Tensor q) -> Tensor", TORCH_FN(scan)); }
#define LONGPREFILL_OPS_IN(namespace_, tag, m) TORCH_LIBRARY_FRAGMENT(namespace_, m)
#define LONGPREFILL_OPS(tag, m) LONGPREFILL_OPS_IN(LONGPREFILL_NAMESPACE, tag, m)

namespace longprefill {
namespace {

constexpr int64_t GRAIN_ELEMENTS = 1 << 15;  // of an elementwise operator that are worth a thread

// Calls body with a null pointer of the element type: fp32 and bf16 are what the compiled kernels take.
template <typename Body>
void for_float_type(const at::Tensor& x, const char* name, Body body) {
    if (x.scalar_type() == at::kFloat) return body(static_cast<float*>(nullptr));
    TORCH_CHECK_VALUE(x.scalar_type() == at::kBFloat16, name, " has dtype ", x.scalar_type(), ": float32 or bfloat16");
    body(static_cast<c10::BFloat16*>(nullptr));
}

inline void check_fp32(const at::Tensor& x, const char* name) {
    TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat, name, " has dtype ", x.scalar_type(), ": must be float32");
}

// All but the first dim must lie close together; rows may be any distance apart (slices of a wider projection).
inline void check_rows_contiguous(const at::Tensor& x, const char* name) {
    if (x.numel() == 0) return;
    int64_t expected = 1;
    for (int64_t dim = x.dim() - 1; dim > 0; --dim) {
        TORCH_CHECK_VALUE(x.size(dim) == 1 || x.stride(dim) == expected, name, " of shape ", x.sizes(), " has strides ",
                          x.strides(), ": only its first dim may be strided, make it contiguous");
        expected *= x.size(dim);
    }
}

// A kernel reads by the sizes that it works out from its first operands: a smaller operand would be read past its end.
inline void check_shape(const at::Tensor& x, const char* name, at::IntArrayRef wanted) {
    TORCH_CHECK_VALUE(x.sizes() == wanted, name, " has shape ", x.sizes(), ": must be ", wanted);
}

inline void check_dim(const at::Tensor& x, const char* name, int64_t dim) {
    TORCH_CHECK_VALUE(x.dim() == dim, name, " has shape ", x.sizes(), ": must have ", dim, " dims");
}

inline void check_contiguous(const at::Tensor& x, const char* name) {
    TORCH_CHECK_VALUE(x.is_contiguous(), name, " of shape ", x.sizes(), " has strides ", x.strides(),
                      ": make it contiguous");
}

// Of this shape and in one piece: what a kernel reads by one pointer.
inline void check_whole(const at::Tensor& x, const char* name, at::IntArrayRef wanted) {
    check_shape(x, name, wanted);
    check_contiguous(x, name);
}

}  // namespace
}  // namespace longprefill
