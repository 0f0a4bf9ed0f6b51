// Hyper-connections: weights that mix a token's residual streams, and the streams after a sublayer (../README.md).
//
// M streams of D numbers, F = M D, W = 2 M + M M weights a token. LANES tokens go together: products of their rows with
// the projection, then everything that is per weight with a token in each lane.
#include <algorithm>

#include "longprefill/buffer.h"
#include "longprefill/gemm.h"
#include "longprefill/torch.h"

namespace longprefill {
namespace {

constexpr int64_t CHUNK = 1024;  // numbers of a token's streams that meet the projection at a time

LP_INLINE int64_t rounded(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// Weights of LANES tokens. `raw` is [W, LANES].
class TokenWeights {
public:
    TokenWeights(const float* projection, const float* base, const float* scale, int64_t streams, int64_t size)
        : base_(base), scale_(scale), streams_(streams), size_(size), num_weights_(2 * streams + streams * streams),
          padded_weights_(rounded(num_weights_, DOT_KEYS)), rows_(Buffer<float>::zeros(LANES * CHUNK)),
          keys_(Buffer<float>::zeros(padded_weights_ * rounded(size, CHUNK))),
          products_(Buffer<float>(LANES * padded_weights_)), sums_(Buffer<float>(LANES * padded_weights_)),
          raw_(Buffer<float>(num_weights_ * LANES)) {
        for (int64_t from = 0; from < size_; from += CHUNK)
            for (int64_t w = 0; w < num_weights_; ++w)
                std::memcpy(keys_.get() + from * padded_weights_ + w * CHUNK, projection + w * size_ + from,
                            std::min(CHUNK, size_ - from) * sizeof(float));
    }

    // `count` tokens, `size` numbers each, from `tokens` on.
    template <typename T>
    void project(const T* tokens, int64_t count, float norm_eps) {
        std::fill_n(sums_.get(), LANES * padded_weights_, 0.0f);
        float squares[LANES] = {};
        for (int64_t from = 0; from < size_; from += CHUNK) {
            const int64_t width = std::min(CHUNK, size_ - from);
            for (int64_t t = 0; t < count; ++t) {
                Vec total{};
                for_each_vector(width, [&](int64_t i, int some) {
                    const Vec x = load_some(tokens + t * size_ + from + i, some);
                    total += x * x;
                    store(rows_.get() + t * CHUNK + i, x);
                });
                squares[t] += sum(total);
            }
            inner_products(rows_.get(), LANES, keys_.get() + from * padded_weights_, padded_weights_, CHUNK,
                           rounded(width, LANES), products_.get(), padded_weights_);
            for (int64_t i = 0; i < LANES * padded_weights_; ++i) sums_[i] += products_[i];
        }
        for (int t = 0; t < LANES; ++t) {
            const float inverse = 1.0f / __builtin_sqrtf(squares[t] / static_cast<float>(size_) + norm_eps);
            for (int64_t w = 0; w < num_weights_; ++w) {
                const float scale = scale_[w < streams_ ? 0 : (w < 2 * streams_ ? 1 : 2)];
                raw_[w * LANES + t] = base_[w] + sums_[t * padded_weights_ + w] * (inverse * scale);
            }
        }
    }

    // Into weights of the sublayer's input and output and, by Sinkhorn's normalisation, between the streams.
    void normalize(int64_t iterations, float eps) {
        for (int64_t m = 0; m < streams_; ++m) {
            set(m, sigmoid(get(m)) + splat(eps));
            set(streams_ + m, splat(2.0f) * sigmoid(get(streams_ + m)));
            Vec top = get(between(m, 0)), total{};
            for (int64_t n = 1; n < streams_; ++n) top = max(get(between(m, n)), top);
            for (int64_t n = 0; n < streams_; ++n) set(between(m, n), exp(get(between(m, n)) - top));
            for (int64_t n = 0; n < streams_; ++n) total += get(between(m, n));
            const Vec share = splat(1.0f) / total;
            for (int64_t n = 0; n < streams_; ++n) set(between(m, n), get(between(m, n)) * share + splat(eps));
        }
        divide_columns(eps);
        for (int64_t i = 1; i < iterations; ++i) divide_rows(eps), divide_columns(eps);
    }

    LP_INLINE float operator()(int64_t weight, int64_t token) const { return raw_[weight * LANES + token]; }
    LP_INLINE int64_t between(int64_t from, int64_t to) const { return 2 * streams_ + from * streams_ + to; }

private:
    LP_INLINE Vec get(int64_t weight) const { return load(raw_.get() + weight * LANES); }
    LP_INLINE void set(int64_t weight, Vec x) const { store(raw_.get() + weight * LANES, x); }

    void divide_rows(float eps) {
        for (int64_t m = 0; m < streams_; ++m) {
            Vec total = splat(eps);
            for (int64_t n = 0; n < streams_; ++n) total += get(between(m, n));
            const Vec share = splat(1.0f) / total;
            for (int64_t n = 0; n < streams_; ++n) set(between(m, n), get(between(m, n)) * share);
        }
    }
    void divide_columns(float eps) {
        for (int64_t n = 0; n < streams_; ++n) {
            Vec total = splat(eps);
            for (int64_t m = 0; m < streams_; ++m) total += get(between(m, n));
            const Vec share = splat(1.0f) / total;
            for (int64_t m = 0; m < streams_; ++m) set(between(m, n), get(between(m, n)) * share);
        }
    }

    const float *base_, *scale_;
    int64_t streams_, size_, num_weights_, padded_weights_;
    Buffer<float> rows_, keys_, products_, sums_, raw_;
};

// (input [T, D], post fp32 [T, M], comb fp32 [T, M, M]) of streams [T, M, D].
std::tuple<at::Tensor, at::Tensor, at::Tensor> hyper_mix(const at::Tensor& streams, const at::Tensor& projection,
                                                         const at::Tensor& base, const at::Tensor& scale,
                                                         int64_t iterations, double eps, double norm_eps) {
    TORCH_CHECK_VALUE(streams.is_contiguous() && projection.is_contiguous(), "operands must be contiguous");
    const int64_t num_rows = streams.size(0), num_streams = streams.size(1), hidden = streams.size(2);
    const auto narrow = streams.options().dtype(at::kFloat);
    at::Tensor input = at::empty({num_rows, hidden}, streams.options());
    at::Tensor post = at::empty({num_rows, num_streams}, narrow);
    at::Tensor comb = at::empty({num_rows, num_streams, num_streams}, narrow);
    float *post_data = post.mutable_data_ptr<float>(), *comb_data = comb.mutable_data_ptr<float>();
    for_float_type(streams, "streams", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T* data = streams.const_data_ptr<T>();
        T* input_data = input.mutable_data_ptr<T>();
        at::parallel_for(0, rounded(num_rows, LANES) / LANES, 1, [&](int64_t first, int64_t last) {
            TokenWeights weights(projection.const_data_ptr<float>(), base.const_data_ptr<float>(),
                                 scale.const_data_ptr<float>(), num_streams, num_streams * hidden);
            for (int64_t begin = first * LANES; begin < std::min(last * LANES, num_rows); begin += LANES) {
                const int64_t count = std::min<int64_t>(LANES, num_rows - begin);
                weights.project(data + begin * num_streams * hidden, count, static_cast<float>(norm_eps));
                weights.normalize(iterations, static_cast<float>(eps));
                for (int64_t t = 0; t < count; ++t) {
                    const T* token = data + (begin + t) * num_streams * hidden;
                    for_each_vector(hidden, [&](int64_t i, int some) {
                        Vec total{};
                        for (int64_t m = 0; m < num_streams; ++m)
                            total += load_some(token + m * hidden + i, some) * weights(m, t);
                        store_some(input_data + (begin + t) * hidden + i, total, some);
                    });
                    for (int64_t m = 0; m < num_streams; ++m) {
                        post_data[(begin + t) * num_streams + m] = weights(num_streams + m, t);
                        for (int64_t n = 0; n < num_streams; ++n)
                            comb_data[((begin + t) * num_streams + m) * num_streams + n] =
                                weights(weights.between(m, n), t);
                    }
                }
            }
        });
    });
    return {input, post, comb};
}

constexpr int64_t MAX_STREAMS = 16;

// A token's new streams: stream n becomes sum over m of comb[m, n] stream m, plus post[n] output. STREAMS 0: any.
template <int STREAMS, typename T>
LP_INLINE void update_token(const T* token, const T* output, const float* post, const float* comb, int64_t num_streams,
                            int64_t hidden, T* to) {
    const int64_t streams = STREAMS > 0 ? STREAMS : num_streams;
    for_each_vector(hidden, [&](int64_t i, int some) {
        Vec old[STREAMS > 0 ? STREAMS : MAX_STREAMS];
#pragma GCC unroll 8
        for (int64_t m = 0; m < streams; ++m) old[m] = load_some(token + m * hidden + i, some);
        const Vec added = load_some(output + i, some);
#pragma GCC unroll 8
        for (int64_t n = 0; n < streams; ++n) {
            Vec total = added * post[n];
#pragma GCC unroll 8
            for (int64_t m = 0; m < streams; ++m) total += old[m] * comb[m * streams + n];
            store_some(to + n * hidden + i, total, some);
        }
    });
}

at::Tensor hyper_update(const at::Tensor& streams, const at::Tensor& output, const at::Tensor& post,
                        const at::Tensor& comb) {
    TORCH_CHECK_VALUE(streams.is_contiguous() && post.is_contiguous() && comb.is_contiguous(),
                      "operands must be contiguous");
    check_rows_contiguous(output, "output");
    TORCH_CHECK_VALUE(streams.size(1) <= MAX_STREAMS, streams.size(1), " streams: at most ", MAX_STREAMS);
    const int64_t num_rows = streams.size(0), num_streams = streams.size(1), hidden = streams.size(2);
    at::Tensor out = at::empty(streams.sizes(), streams.options());
    const float *post_data = post.const_data_ptr<float>(), *comb_data = comb.const_data_ptr<float>();
    for_float_type(streams, "streams", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T *data = streams.const_data_ptr<T>(), *added = output.const_data_ptr<T>();
        T* out_data = out.mutable_data_ptr<T>();
        at::parallel_for(0, num_rows, 8, [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; ++t) {
                const int64_t at = t * num_streams * hidden;
                const float* token_post = post_data + t * num_streams;
                const float* token_comb = comb_data + t * num_streams * num_streams;
                const T* row = added + t * output.stride(0);
                if (num_streams == 4)
                    update_token<4>(data + at, row, token_post, token_comb, 4, hidden, out_data + at);
                else
                    update_token<0>(data + at, row, token_post, token_comb, num_streams, hidden, out_data + at);
            }
        });
    });
    return out;
}

LONGPREFILL_OPS(hyper, m) {
    m.def("hyper_mix(Tensor streams, Tensor projection, Tensor base, Tensor scale, int iterations, float eps, "
          "float norm_eps) -> (Tensor, Tensor, Tensor)",
          TORCH_FN(hyper_mix));
    m.def("hyper_update(Tensor streams, Tensor output, Tensor post, Tensor comb) -> Tensor", TORCH_FN(hyper_update));
}

}  // namespace
}  // namespace longprefill
