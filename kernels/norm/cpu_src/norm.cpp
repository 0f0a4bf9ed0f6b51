// Normalisations over the last dim: one read of a row from memory, the second from cache. Casts as in ../plain.py.
#include <algorithm>
#include <type_traits>

#include "longprefill/torch.h"

namespace longprefill {
namespace {

template <typename T>
float mean_square(const T* x, int64_t size) {
    Vec sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int part = 0; part < 4; ++part) {
            const Vec value = load(x + i + part * LANES);
            sums[part] += value * value;
        }
    for_each_vector(size - i, [&](int64_t j, int count) {
        const Vec value = load_some(x + i + j, count);
        sums[0] += value * value;
    });
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(size);
}

template <typename Row>
void for_each_row(const at::Tensor& x, Row row) {
    const int64_t width = x.size(-1), num_rows = width ? x.numel() / width : 0;
    at::parallel_for(0, num_rows, std::max<int64_t>(1, GRAIN_ELEMENTS / std::max<int64_t>(1, width)),
                     [&](int64_t first, int64_t end) {
                         for (int64_t i = first; i < end; ++i) row(i);
                     });
}

template <typename T>
LP_INLINE void write_rms_norm(const T* row, const T* scale, int64_t width, float eps, T* out) {
    const float inverse = 1.0f / __builtin_sqrtf(mean_square(row, width) + eps);
    for_each_vector(width, [&](int64_t j, int count) {
        const Vec value = rounded_to<T>(load_some(row + j, count) * inverse);
        store_some(out + j, value * load_some(scale + j, count), count);
    });
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
    check_contiguous(x, "x"), check_whole(weight, "weight", {x.size(-1)});
    at::Tensor out = at::empty(x.sizes(), x.options());
    const int64_t width = x.size(-1);
    for_float_type(x, "x", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T *x_data = x.const_data_ptr<T>(), *scale = weight.const_data_ptr<T>();
        T* out_data = out.mutable_data_ptr<T>();
        for_each_row(x, [&](int64_t i) {
            write_rms_norm(x_data + i * width, scale, width, static_cast<float>(eps), out_data + i * width);
        });
    });
    return out;
}

// Adds x to `total`, which it overwrites, and gives rms_norm of the new total: all contiguous, of one dtype.
at::Tensor add_rms_norm(const at::Tensor& total, const at::Tensor& x, const at::Tensor& weight, double eps) {
    check_contiguous(x, "x"), check_whole(total, "the sum", x.sizes()), check_whole(weight, "weight", {x.size(-1)});
    at::Tensor out = at::empty(x.sizes(), x.options());
    const int64_t width = x.size(-1);
    for_float_type(x, "x", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T *x_data = x.const_data_ptr<T>(), *scale = weight.const_data_ptr<T>();
        T *total_data = total.mutable_data_ptr<T>(), *out_data = out.mutable_data_ptr<T>();
        for_each_row(x, [&](int64_t i) {
            T* row = total_data + i * width;
            for_each_vector(width, [&](int64_t j, int count) {
                store_some(row + j, load_some(row + j, count) + load_some(x_data + i * width + j, count), count);
            });
            write_rms_norm(row, scale, width, static_cast<float>(eps), out_data + i * width);
        });
    });
    return out;
}

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps) {
    check_contiguous(x, "x"), check_whole(weight, "weight", {x.size(-1)}), check_whole(bias, "bias", {x.size(-1)});
    at::Tensor out = at::empty(x.sizes(), x.options());
    const int64_t width = x.size(-1);
    const float *scale = weight.const_data_ptr<float>(), *shift = bias.const_data_ptr<float>();
    for_float_type(x, "x", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T* x_data = x.const_data_ptr<T>();
        T* out_data = out.mutable_data_ptr<T>();
        for_each_row(x, [&](int64_t i) {
            const T* row = x_data + i * width;
            Vec total{};
            for_each_vector(width, [&](int64_t j, int count) { total += load_some(row + j, count); });
            const float mean = sum(total) / static_cast<float>(width);
            // Squares of differences, not a difference of squares: a large mean must not cost digits.
            Vec squares{};
            for_each_vector(width, [&](int64_t j, int count) {
                Vec centred = load_some(row + j, count) - mean;
                if (count < LANES)
                    for (int lane = count; lane < LANES; ++lane) centred[lane] = 0;
                squares += centred * centred;
            });
            const float inverse =
                1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + static_cast<float>(eps));
            for_each_vector(width, [&](int64_t j, int count) {
                const Vec normed = (load_some(row + j, count) - mean) * inverse;
                store_some(out_data + i * width + j, normed * load_some(scale + j, count) + load_some(shift + j, count),
                           count);
            });
        });
    });
    return out;
}

// x and gate have one dtype; weight is fp32.
at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps) {
    check_contiguous(x, "x"), check_whole(gate, "gate", x.sizes()), check_whole(weight, "weight", {x.size(-1)});
    at::Tensor out = at::empty(x.sizes(), x.options());
    const int64_t width = x.size(-1);
    const float* scale = weight.const_data_ptr<float>();
    for_float_type(x, "x", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T *x_data = x.const_data_ptr<T>(), *gate_data = gate.const_data_ptr<T>();
        T* out_data = out.mutable_data_ptr<T>();
        for_each_row(x, [&](int64_t i) {
            const T *row = x_data + i * width, *gates = gate_data + i * width;
            const float inverse = 1.0f / __builtin_sqrtf(mean_square(row, width) + static_cast<float>(eps));
            for_each_vector(width, [&](int64_t j, int count) {
                const Vec factor = sigmoid(load_some(gates + j, count)) * load_some(scale + j, count);
                store_some(out_data + i * width + j, factor * load_some(row + j, count) * inverse, count);
            });
        });
    });
    return out;
}

}  // namespace

LONGPREFILL_OPS(norm, m) {
    m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", TORCH_FN(rms_norm));
    m.def("add_rms_norm(Tensor(a!) total, Tensor x, Tensor weight, float eps) -> Tensor", TORCH_FN(add_rms_norm));
    m.def("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor", TORCH_FN(layer_norm));
    m.def("gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps) -> Tensor", TORCH_FN(gated_rms_norm));
}

}  // namespace longprefill
