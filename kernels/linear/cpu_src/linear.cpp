// What a feed-forward needs beside torch's matrix products: its gated activation in one pass, and products of bf16
// operands that stay fp32.
#include <algorithm>

#include "longprefill/amx.h"
#include "longprefill/buffer.h"
#include "longprefill/torch.h"

namespace longprefill {
namespace {

// [T, F] of [T, 2 F], gate first: silu(min(gate, limit)) * clamp(up, -limit, limit), one rounding at the end.
at::Tensor gated_silu(const at::Tensor& gate_up, double clamp) {
    check_rows_contiguous(gate_up, "gate_up");
    const int64_t num_rows = gate_up.size(0), inner = gate_up.size(1) / 2, stride = gate_up.stride(0);
    at::Tensor out = at::empty({num_rows, inner}, gate_up.options());
    const Vec limit = splat(static_cast<float>(clamp));
    for_float_type(gate_up, "gate_up", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T* data = gate_up.const_data_ptr<T>();
        T* out_data = out.mutable_data_ptr<T>();
        const int64_t grain = std::max<int64_t>(1, GRAIN_ELEMENTS / std::max<int64_t>(1, inner));
        at::parallel_for(0, num_rows, grain, [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; ++t) {
                const T *gates = data + t * stride, *ups = gates + inner;
                for_each_vector(inner, [&](int64_t i, int count) {
                    Vec gate = load_some(gates + i, count), up = load_some(ups + i, count);
                    gate = gate > limit ? limit : gate;
                    up = up > limit ? limit : (up < -limit ? -limit : up);
                    store_some(out_data + t * inner + i, gate * sigmoid(gate) * up, count);
                });
            }
        });
    });
    return out;
}

#if defined(LONGPREFILL_AMX)

constexpr int64_t BLOCK_ROWS = 64;  // rows of x

// fp32 [T, E] of bf16 x [T, D] and weight [E, D], D a multiple of 32: products of bf16 numbers are exact in fp32.
at::Tensor linear_fp32(const at::Tensor& x, const at::Tensor& weight) {
    check_rows_contiguous(x, "x");
    const int64_t num_rows = x.size(0), depth = x.size(1), num_out = weight.size(0);
    TORCH_CHECK_VALUE(weight.is_contiguous() && weight.size(1) == depth && depth % AMX_DEPTH == 0,
                      "weight must be contiguous, as wide as x, and a multiple of ", AMX_DEPTH, " wide");
    const Bf16 *x_data = x.const_data_ptr<Bf16>(), *weight_data = weight.const_data_ptr<Bf16>();
    const int64_t columns = padded(num_out, AMX_COLUMNS);
    const Buffer<Bf16> packed(depth * columns), sixteen = Buffer<Bf16>::zeros(16 * depth);
    for (int64_t n = 0; n < columns; n += 16) {
        const int64_t present = std::min<int64_t>(16, num_out - n);
        std::memset(static_cast<void*>(sixteen.get()), 0, 16 * depth * sizeof(Bf16));
        std::memcpy(static_cast<void*>(sixteen.get()), weight_data + n * depth, present * depth * sizeof(Bf16));
        pack_sixteen_rows(sixteen.get(), depth, depth, packed.get(), columns, n);
    }
    at::Tensor out = at::empty({num_rows, num_out}, x.options().dtype(at::kFloat));
    float* out_data = out.mutable_data_ptr<float>();
    at::parallel_for(0, (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS, 4, [&](int64_t first, int64_t last) {
        const AmxProducts release;
        const Buffer<float> products(BLOCK_ROWS * columns);
        for (int64_t block = first; block < last; ++block) {
            const int64_t begin = block * BLOCK_ROWS, count = std::min(BLOCK_ROWS, num_rows - begin);
            const Bf16* rows = x_data + begin * x.stride(0);
            int64_t stride = x.stride(0);
            Buffer<Bf16> rest;
            if (count < BLOCK_ROWS) {  // one shape only
                rest = Buffer<Bf16>::zeros(BLOCK_ROWS * depth);
                for (int64_t t = 0; t < count; ++t)
                    std::memcpy(static_cast<void*>(rest.get() + t * depth), rows + t * stride, depth * sizeof(Bf16));
                rows = rest.get(), stride = depth;
            }
            amx_multiply(BLOCK_ROWS, columns, depth, rows, stride, packed.get(), columns, products.get(), columns, false);
            for (int64_t t = 0; t < count; ++t)
                std::memcpy(out_data + (begin + t) * num_out, products.get() + t * columns, num_out * sizeof(float));
        }
    });
    return out;
}

#endif

bool linear_has_fp32() {
#if defined(LONGPREFILL_AMX)
    return has_amx_products();
#else
    return false;
#endif
}

LONGPREFILL_OPS(linear, m) {
    m.def("gated_silu(Tensor gate_up, float clamp) -> Tensor", TORCH_FN(gated_silu));
    m.def("linear_has_fp32() -> bool", TORCH_FN(linear_has_fp32));
#if defined(LONGPREFILL_AMX)
    m.def("linear_fp32(Tensor x, Tensor weight) -> Tensor", TORCH_FN(linear_fp32));
#endif
}

}  // namespace
}  // namespace longprefill
