// Everything between the projections and the recurrence in one pass: conv + SiLU + l2 norm of q and k, conv + SiLU of v,
// the log decay and beta. Formulas: ../README.md, "Inputs".
//
// Legend: T tokens, N segments, C channels (q | k | v), W conv width, H q/k heads, G value heads, K key dim, V value dim.
// A task is a block of rows with all its channels: a head of the block stays in L1 between its sums and its norm.
#include <algorithm>
#include <vector>

#include "longprefill/torch.h"

namespace longprefill {
namespace {

// Rows lie far apart and push each other out of L1: where a vector is half a line or less, few of them come back for it.
constexpr int64_t FRONT_ROWS = LANES == 16 ? 16 : 8;
constexpr int64_t WHOLE_WINDOW = 4;  // the conv width of all published models: its window moves through registers

// Raw rows of one segment from row `first` on; those before the segment's start are its history.
template <typename T, typename H>
struct RawRows {
    const T* rows;
    const H* history;  // W - 1 rows
    int64_t row_stride, history_stride, width;

    LP_INLINE Vec at(int64_t row, int64_t c, int count) const {
        return row >= 0 ? load_some(rows + row * row_stride + c, count)
                        : load_some(history + (row + width - 1) * history_stride + c, count);
    }
};

// Calls emit(row, silu of the convolution) for rows [first, end) and the vector of channels at c. `taps` is [W, C].
template <typename T, typename H, typename Emit>
LP_INLINE void convolve(const RawRows<T, H>& raw, const float* taps, int64_t channels, int64_t first, int64_t end,
                        int64_t c, int count, Emit emit) {
    if (raw.width != WHOLE_WINDOW) {
        for (int64_t row = first; row < end; ++row) {
            Vec total{};
            for (int64_t tap = 0; tap < raw.width; ++tap)
                total += raw.at(row - raw.width + 1 + tap, c, count) * load_some(taps + tap * channels + c, count);
            emit(row, total * sigmoid(total));
        }
        return;
    }
    const Vec w0 = load_some(taps + c, count), w1 = load_some(taps + channels + c, count);
    const Vec w2 = load_some(taps + 2 * channels + c, count), w3 = load_some(taps + 3 * channels + c, count);
    Vec x0 = raw.at(first - 3, c, count), x1 = raw.at(first - 2, c, count), x2 = raw.at(first - 1, c, count);
    const T* from = raw.rows + first * raw.row_stride + c;
    for (int64_t row = first; row < end; ++row, from += raw.row_stride) {
        const Vec x3 = load_some(from, count), total = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3;
        emit(row, total * sigmoid(total));
        x0 = x1, x1 = x2, x2 = x3;
    }
}

// One q or k head, rows [first, end): out rows are out_stride apart.
template <typename T, typename H>
void normalized_head(const RawRows<T, H>& raw, const float* taps, int64_t channels, int64_t first, int64_t end,
                     int64_t from, int64_t size, float eps, float* out, int64_t out_stride) {
    Vec squares[FRONT_ROWS] = {};
    for_each_vector(size, [&](int64_t c, int count) {
        convolve(raw, taps, channels, first, end, from + c, count, [&](int64_t row, Vec value) {
            store_some(out + (row - first) * out_stride + c, value, count);
            squares[row - first] += value * value;
        });
    });
    for (int64_t row = 0; row < end - first; ++row) {
        const float inverse = 1.0f / __builtin_sqrtf(sum(squares[row]) + eps);
        for_each_vector(size, [&](int64_t c, int count) {
            float* place = out + row * out_stride + c;
            store_some(place, load_some(place, count) * inverse, count);
        });
    }
}

template <typename T>
void decay_row(const T* x, const float* slopes, const float* biases, std::optional<double> lower_bound, int64_t heads,
               int64_t num_keys, float* out) {
    for (int64_t head = 0; head < heads; ++head) {
        const int64_t place = head * num_keys;
        for_each_vector(num_keys, [&](int64_t c, int count) {
            const Vec shifted = load_some(x + place + c, count) + load_some(biases + place + c, count);
            const Vec decay = lower_bound ? sigmoid(shifted * slopes[head]) * static_cast<float>(*lower_bound)
                                          : softplus(shifted) * -slopes[head];
            store_some(out + place + c, decay, count);
        });
    }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> inputs(
    const at::Tensor& raw, const at::Tensor& taps, const at::Tensor& decay, const at::Tensor& beta,
    at::IntArrayRef offsets, const at::Tensor& history, int64_t key_heads, const at::Tensor& slope,
    const at::Tensor& bias, std::optional<double> lower_bound, double largest_beta, double eps) {
    check_dim(raw, "raw", 2), check_rows_contiguous(raw, "raw");
    check_rows_contiguous(decay, "decay"), check_rows_contiguous(beta, "beta");
    const int64_t num_tokens = raw.size(0), channels = raw.size(1), width = taps.size(0);
    const int64_t heads = decay.size(1), num_keys = decay.size(2), key_width = key_heads * num_keys;
    const int64_t value_width = channels - 2 * key_width, num_segments = static_cast<int64_t>(offsets.size()) - 1;
    TORCH_CHECK_VALUE(key_heads > 0 && value_width >= 0 && heads > 0 && value_width % heads == 0, "raw has ", channels,
                      " channels: must be 2 * ", key_heads, " * ", num_keys, " of q and k, and a multiple of ", heads,
                      " for the value heads");
    check_shape(decay, "decay", {num_tokens, heads, num_keys}), check_shape(beta, "beta", {num_tokens, heads});
    check_whole(taps, "weight, taps first,", {width, channels});
    check_whole(history, "history", {num_segments, width - 1, channels});
    check_whole(slope, "a_log", {heads}), check_whole(bias, "dt_bias", {heads, num_keys});
    TORCH_CHECK_VALUE(decay.scalar_type() == raw.scalar_type() && beta.scalar_type() == raw.scalar_type(),
                      "raw has dtype ", raw.scalar_type(), ", decay ", decay.scalar_type(), ", beta ",
                      beta.scalar_type(), ": cast them to one");
    check_fp32(taps, "taps"), check_fp32(slope, "slope"), check_fp32(bias, "bias");
    const auto fp32 = raw.options().dtype(at::kFloat);
    at::Tensor q = at::empty({num_tokens, key_heads, num_keys}, fp32), k = at::empty(q.sizes(), fp32);
    at::Tensor v = at::empty({num_tokens, heads, value_width / heads}, raw.options());
    at::Tensor g = at::empty({num_tokens, heads, num_keys}, fp32), beta_out = at::empty({num_tokens, heads}, fp32);
    struct Task { int64_t segment, first, end; };
    std::vector<Task> tasks;
    for (int64_t n = 0; n < num_segments; ++n)
        for (int64_t row = offsets[n]; row < offsets[n + 1]; row += FRONT_ROWS)
            tasks.push_back({n, row - offsets[n], std::min(row + FRONT_ROWS, offsets[n + 1]) - offsets[n]});
    const float *taps_data = taps.const_data_ptr<float>(), *slopes = slope.const_data_ptr<float>();
    const float* biases = bias.const_data_ptr<float>();
    float *q_data = q.mutable_data_ptr<float>(), *k_data = k.mutable_data_ptr<float>();
    float *g_data = g.mutable_data_ptr<float>(), *beta_data = beta_out.mutable_data_ptr<float>();
    const float eps_here = static_cast<float>(eps), largest = static_cast<float>(largest_beta);
    for_float_type(raw, "raw", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for_float_type(history, "history", [&](auto* history_type) {
            using H = std::remove_pointer_t<decltype(history_type)>;
            const T *raw_data = raw.const_data_ptr<T>(), *decay_data = decay.const_data_ptr<T>();
            const T* logits = beta.const_data_ptr<T>();
            const H* history_data = history.const_data_ptr<H>();
            T* v_data = v.mutable_data_ptr<T>();
            at::parallel_for(0, static_cast<int64_t>(tasks.size()), 1, [&](int64_t begin, int64_t stop) {
                for (int64_t i = begin; i < stop; ++i) {
                    const Task& task = tasks[i];
                    const int64_t start = offsets[task.segment], t = start + task.first;
                    const RawRows<T, H> rows{raw_data + start * raw.stride(0),
                                             history_data + task.segment * (width - 1) * channels, raw.stride(0),
                                             channels, width};
                    for (int64_t head = 0; head < 2 * key_heads; ++head) {
                        float* out = head < key_heads ? q_data : k_data;
                        normalized_head(rows, taps_data, channels, task.first, task.end, head * num_keys, num_keys,
                                        eps_here, out + t * key_width + head % key_heads * num_keys, key_width);
                    }
                    for_each_vector(value_width, [&](int64_t c, int count) {
                        convolve(rows, taps_data, channels, task.first, task.end, 2 * key_width + c, count,
                                 [&](int64_t row, Vec value) {
                                     store_some(v_data + (start + row) * value_width + c, value, count);
                                 });
                    });
                    for (int64_t row = t; row < start + task.end; ++row) {
                        decay_row(decay_data + row * decay.stride(0), slopes, biases, lower_bound, heads, num_keys,
                                  g_data + row * heads * num_keys);
                        for_each_vector(heads, [&](int64_t h, int count) {
                            store_some(beta_data + row * heads + h,
                                       sigmoid(load_some(logits + row * beta.stride(0) + h, count)) * largest, count);
                        });
                    }
                }
            });
        });
    });
    return {q, k, v, g, beta_out};
}

}  // namespace

LONGPREFILL_OPS(kda_front, m) {
    m.def("kda_inputs(Tensor raw, Tensor taps, Tensor decay, Tensor beta, int[] offsets, Tensor history, int key_heads, "
          "Tensor slope, Tensor bias, float? lower_bound, float largest_beta, float eps) -> "
          "(Tensor, Tensor, Tensor, Tensor, Tensor)",
          TORCH_FN(inputs));
}

}  // namespace longprefill
