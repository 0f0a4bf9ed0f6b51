// Hyper-connections: weights that mix a token's residual streams, and the streams after a sublayer (../README.md).
//
// M streams of D numbers, F = M D, W = 2 M + M M weights a token. BLOCK_TOKENS tokens at a time: their old streams become the
// new ones, whose rows meet the projection in cache; then LANES tokens at a time everything that is per weight, with a
// token in each lane.
#include <algorithm>
#include <optional>

#include "longprefill/amx.h"
#include "longprefill/buffer.h"
#include "longprefill/gemm.h"
#include "longprefill/torch.h"

namespace longprefill {
namespace {

constexpr int64_t BLOCK_TOKENS = 64;    // tokens
constexpr int64_t CHUNK = 1024;  // numbers of a token's streams that meet the projection at a time
constexpr int64_t MAX_STREAMS = 16;

struct Sizes {
    int64_t streams, hidden;
    int64_t token() const { return streams * hidden; }
    int64_t weights() const { return 2 * streams + streams * streams; }
};

// Products of up to BLOCK_TOKENS tokens with the projection in fp32: LANES rows at a time.
class WideProducts {
public:
    WideProducts(const float* projection, const Sizes& sizes)
        : size_(sizes.token()), padded_weights_(padded(sizes.weights(), DOT_KEYS)),
          rows_(Buffer<float>::zeros(LANES * CHUNK)), keys_(Buffer<float>::zeros(padded_weights_ * padded(size_, CHUNK))),
          products_(LANES * padded_weights_), sums_(BLOCK_TOKENS * padded_weights_) {
        for (int64_t from = 0; from < size_; from += CHUNK)
            for (int64_t w = 0; w < sizes.weights(); ++w)
                std::memcpy(keys_.get() + from * padded_weights_ + w * CHUNK, projection + w * size_ + from,
                            std::min(CHUNK, size_ - from) * sizeof(float));
    }

    template <typename T>
    void run(const T* tokens, int64_t count) {
        std::fill_n(sums_.get(), BLOCK_TOKENS * padded_weights_, 0.0f);
        for (int64_t first = 0; first < count; first += LANES)
            for (int64_t from = 0; from < size_; from += CHUNK) {
                const int64_t width = std::min(CHUNK, size_ - from);
                for (int64_t t = 0; t < std::min<int64_t>(LANES, count - first); ++t)
                    for_each_vector(width, [&](int64_t i, int some) {
                        store(rows_.get() + t * CHUNK + i, load_some(tokens + (first + t) * size_ + from + i, some));
                    });
                inner_products(rows_.get(), LANES, keys_.get() + from * padded_weights_, padded_weights_, CHUNK,
                               padded(width, LANES), products_.get(), padded_weights_);
                float* sums = sums_.get() + first * padded_weights_;
                for (int64_t i = 0; i < LANES * padded_weights_; ++i) sums[i] += products_[i];
            }
    }

    LP_INLINE float operator()(int64_t token, int64_t weight) const { return sums_[token * padded_weights_ + weight]; }

private:
    int64_t size_, padded_weights_;
    Buffer<float> rows_, keys_, products_, sums_;
};

#if defined(LONGPREFILL_AMX)
// The same for bf16 tokens on AMX, as exactly: an fp32 weight is the sum of three bf16 numbers.
class SplitProducts {
public:
    static constexpr int64_t PARTS = 3;
    static constexpr int64_t FEWEST_TOKENS = 4 * BLOCK_TOKENS;  // fewer are done before the weights are split
    static constexpr int64_t DEPTH = 4096;  // products summed in one go: errors of a chain of fp32 sums grow with it

    // `num_tokens` of the call, not of a thread's share: how many threads there are must change no bit.
    static bool suits(const Sizes& sizes, int64_t num_tokens) {
        return has_amx_products() && num_tokens >= FEWEST_TOKENS && sizes.token() % AMX_DEPTH == 0;
    }

    SplitProducts(const float* projection, const Sizes& sizes)
        : size_(sizes.token()), weights_(sizes.weights()), columns_(padded(PARTS * weights_, AMX_COLUMNS)),
          packed_(size_ * columns_), rows_(Buffer<Bf16>::zeros(BLOCK_TOKENS * size_)), sums_(BLOCK_TOKENS * columns_),
          further_(BLOCK_TOKENS * columns_) {
        const Buffer<Bf16> parts = Buffer<Bf16>::zeros(columns_ * size_);
        for (int64_t w = 0; w < weights_; ++w)
            for_each_vector(size_, [&](int64_t i, int count) {
                Vec left = load_some(projection + w * size_ + i, count);
                for (int64_t part = 0; part < PARTS; ++part) {
                    const Vec rounded = rounded_to<Bf16>(left);
                    store_some(parts.get() + (part * weights_ + w) * size_ + i, rounded, count);
                    left -= rounded;
                }
            });
        for (int64_t column = 0; column < columns_; column += 16)
            pack_sixteen_rows(parts.get() + column * size_, size_, size_, packed_.get(), columns_, column);
    }

    void run(const Bf16* tokens, int64_t count) {
        const AmxProducts release;
        if (count < BLOCK_TOKENS) {  // one shape only, with what an earlier block left behind the last token
            std::memcpy(static_cast<void*>(rows_.get()), tokens, count * size_ * sizeof(Bf16));
            tokens = rows_.get();
        }
        for (int64_t from = 0; from < size_; from += DEPTH) {
            float* sums = from == 0 ? sums_.get() : further_.get();
            amx_multiply(BLOCK_TOKENS, columns_, std::min(DEPTH, size_ - from), tokens + from, size_,
                         packed_.get() + from * columns_, columns_, sums, columns_, false);
            if (from > 0)
                for (int64_t i = 0; i < BLOCK_TOKENS * columns_; ++i) sums_[i] += further_[i];
        }
    }

    LP_INLINE float operator()(int64_t token, int64_t weight) const {
        const float* sums = sums_.get() + token * columns_ + weight;
        return sums[0] + (sums[weights_] + sums[2 * weights_]);
    }

private:
    int64_t size_, weights_, columns_;
    Buffer<Bf16> packed_, rows_;
    Buffer<float> sums_, further_;
};
#endif

// Weights of LANES tokens. `raw` is [W, LANES].
class TokenWeights {
public:
    TokenWeights(const float* base, const float* scale, const Sizes& sizes)
        : base_(base), scale_(scale), streams_(sizes.streams), num_weights_(sizes.weights()),
          raw_(Buffer<float>::zeros(num_weights_ * LANES)) {}

    // From the products of tokens [first, first + count) of a block and their 1 / rms.
    template <typename Products>
    void take(const Products& products, const float* inverse_rms, int64_t first, int64_t count) {
        for (int64_t t = 0; t < count; ++t)
            for (int64_t w = 0; w < num_weights_; ++w) {
                const float scale = scale_[w < streams_ ? 0 : (w < 2 * streams_ ? 1 : 2)];
                raw_[w * LANES + t] = base_[w] + products(first + t, w) * (inverse_rms[first + t] * scale);
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
            const Vec share = reciprocal(total);
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
            const Vec share = reciprocal(total);
            for (int64_t n = 0; n < streams_; ++n) set(between(m, n), get(between(m, n)) * share);
        }
    }
    void divide_columns(float eps) {
        for (int64_t n = 0; n < streams_; ++n) {
            Vec total = splat(eps);
            for (int64_t m = 0; m < streams_; ++m) total += get(between(m, n));
            const Vec share = reciprocal(total);
            for (int64_t m = 0; m < streams_; ++m) set(between(m, n), get(between(m, n)) * share);
        }
    }

    const float *base_, *scale_;
    int64_t streams_, num_weights_;
    Buffer<float> raw_;
};

// A token's new streams: stream n becomes sum over m of comb[m, n] stream m, plus post[n] output. STREAMS 0: any.
// MEAN: only the mean of the new streams, each rounded to T, is written.
template <int STREAMS, bool MEAN = false, typename T>
LP_INLINE void update_token(const T* token, const T* output, const float* post, const float* comb, int64_t num_streams,
                            int64_t hidden, T* to) {
    const int64_t streams = STREAMS > 0 ? STREAMS : num_streams;
    for_each_vector(hidden, [&](int64_t i, int some) {
        Vec old[STREAMS > 0 ? STREAMS : MAX_STREAMS];
#pragma GCC unroll 8
        for (int64_t m = 0; m < streams; ++m) old[m] = load_some(token + m * hidden + i, some);
        const Vec added = load_some(output + i, some);
        Vec mean{};
#pragma GCC unroll 8
        for (int64_t n = 0; n < streams; ++n) {
            Vec total = added * post[n];
#pragma GCC unroll 8
            for (int64_t m = 0; m < streams; ++m) total += old[m] * comb[m * streams + n];
            if constexpr (MEAN)
                mean += rounded_to<T>(total);
            else
                store_some(to + n * hidden + i, total, some);
        }
        if constexpr (MEAN) store_some(to + i, mean * (1.0f / static_cast<float>(streams)), some);
    });
}

// What comes between two sublayers: `output` null where the streams are already what the next one reads.
struct Update {
    const at::Tensor *output, *post, *comb;
};

// RMS norm of the sublayer's input (../../norm/README.md): weight in the streams' dtype, or null.
struct InputNorm {
    const std::optional<at::Tensor>& weight;
    double eps;
};

typedef std::tuple<at::Tensor, at::Tensor, at::Tensor> Mix;  // input [T, D], post fp32 [T, M], comb fp32 [T, M, M]

template <typename T>
class Mixer {
public:
    Mixer(const at::Tensor& streams, const Update& update, const InputNorm& norm, const float* base, const float* scale,
          const Mix& mix)
        : update_(update), norm_(norm.weight ? norm.weight->const_data_ptr<T>() : nullptr),
          input_eps_(static_cast<float>(norm.eps)), sizes_{streams.size(1), streams.size(2)}, base_(base), scale_(scale),
          mix_(mix),
          data_(update.output == nullptr ? nullptr : streams.mutable_data_ptr<T>()),
          read_(update.output == nullptr ? streams.const_data_ptr<T>() : data_) {}

    // Tokens [first, last).
    template <typename Products>
    void run(Products& products, int64_t first, int64_t last, int64_t iterations, float eps, float norm_eps) const {
        TokenWeights weights(base_, scale_, sizes_);
        for (int64_t begin = first; begin < last; begin += BLOCK_TOKENS) {
            const int64_t count = std::min(BLOCK_TOKENS, last - begin), size = sizes_.token();
            float inverse_rms[BLOCK_TOKENS];
            for (int64_t t = 0; t < count; ++t) {
                if (update_.output != nullptr) advance(begin + t);
                inverse_rms[t] = inverse_rms_of(read_ + (begin + t) * size, size, norm_eps);
            }
            products.run(read_ + begin * size, count);
            for (int64_t t = 0; t < count; t += LANES) {
                const int64_t some = std::min<int64_t>(LANES, count - t);
                weights.take(products, inverse_rms, t, some);
                weights.normalize(iterations, eps);
                for (int64_t lane = 0; lane < some; ++lane) write(weights, lane, begin + t + lane);
            }
        }
    }

private:
    void advance(int64_t t) const {
        const int64_t m = sizes_.streams, hidden = sizes_.hidden;
        T* token = data_ + t * sizes_.token();
        const T* output = update_.output->template const_data_ptr<T>() + t * update_.output->stride(0);
        const float* post = update_.post->template const_data_ptr<float>() + t * m;
        const float* comb = update_.comb->template const_data_ptr<float>() + t * m * m;
        if (m == 4)
            update_token<4>(token, output, post, comb, m, hidden, token);
        else
            update_token<0>(token, output, post, comb, m, hidden, token);
    }

    static float inverse_rms_of(const T* token, int64_t size, float norm_eps) {
        Vec totals[4] = {};
        int64_t i = 0;
        for (; i + 4 * LANES <= size; i += 4 * LANES)
            for (int part = 0; part < 4; ++part) {
                const Vec x = load(token + i + part * LANES);
                totals[part] += x * x;
            }
        for_each_vector(size - i, [&](int64_t j, int some) {
            const Vec x = load_some(token + i + j, some);
            totals[0] += x * x;
        });
        const float square = sum((totals[0] + totals[1]) + (totals[2] + totals[3]));
        return 1.0f / __builtin_sqrtf(square / static_cast<float>(size) + norm_eps);
    }

    void write(const TokenWeights& weights, int64_t lane, int64_t t) const {
        const int64_t m = sizes_.streams;
        T* input = std::get<0>(mix_).template mutable_data_ptr<T>() + t * sizes_.hidden;
        float* post = std::get<1>(mix_).template mutable_data_ptr<float>() + t * m;
        float* comb = std::get<2>(mix_).template mutable_data_ptr<float>() + t * m * m;
        for (int64_t i = 0; i < m; ++i) post[i] = weights(m + i, lane);
        for (int64_t i = 0; i < m * m; ++i) comb[i] = weights(2 * m + i, lane);
        if (m == 4)
            write_input<4>(weights, lane, read_ + t * sizes_.token(), input);
        else
            write_input<0>(weights, lane, read_ + t * sizes_.token(), input);
    }

    template <int STREAMS>
    LP_INLINE void write_input(const TokenWeights& weights, int64_t lane, const T* token, T* input) const {
        const int64_t streams = STREAMS > 0 ? STREAMS : sizes_.streams, hidden = sizes_.hidden;
        float factors[STREAMS > 0 ? STREAMS : MAX_STREAMS];
        for (int64_t m = 0; m < streams; ++m) factors[m] = weights(m, lane);
        for_each_vector(hidden, [&](int64_t i, int some) {
            Vec total{};
#pragma GCC unroll 8
            for (int64_t m = 0; m < streams; ++m) total += load_some(token + m * hidden + i, some) * factors[m];
            store_some(input + i, total, some);
        });
        if (norm_ == nullptr) return;
        const float inverse = inverse_rms_of(input, hidden, input_eps_);
        for_each_vector(hidden, [&](int64_t i, int some) {
            const Vec normed = rounded_to<T>(load_some(input + i, some) * inverse);
            store_some(input + i, normed * load_some(norm_ + i, some), some);
        });
    }

    Update update_;
    const T* norm_;
    float input_eps_;
    Sizes sizes_;
    const float *base_, *scale_;
    const Mix& mix_;
    T* data_;
    const T* read_;
};

void check_streams(const at::Tensor& streams) {
    check_dim(streams, "streams", 3), check_contiguous(streams, "streams");
    TORCH_CHECK_VALUE(streams.size(1) <= MAX_STREAMS, streams.size(1), " streams: at most ", MAX_STREAMS);
}

// What an update adds to streams [T, M, D].
void check_update(const at::Tensor& streams, const at::Tensor& output, const at::Tensor& post, const at::Tensor& comb) {
    check_streams(streams);
    const int64_t num_rows = streams.size(0), num_streams = streams.size(1);
    check_shape(output, "output", {num_rows, streams.size(2)}), check_rows_contiguous(output, "output");
    check_whole(post, "post", {num_rows, num_streams}), check_whole(comb, "comb", {num_rows, num_streams, num_streams});
}

Mix mixed(const at::Tensor& streams, const Update& update, const InputNorm& norm, const at::Tensor& projection,
          const at::Tensor& base, const at::Tensor& scale, int64_t iterations, double eps, double norm_eps) {
    check_streams(streams);
    const int64_t num_rows = streams.size(0), num_streams = streams.size(1), hidden = streams.size(2);
    const auto wide = streams.options().dtype(at::kFloat);
    const Mix mix{at::empty({num_rows, hidden}, streams.options()), at::empty({num_rows, num_streams}, wide),
                  at::empty({num_rows, num_streams, num_streams}, wide)};
    const Sizes sizes{num_streams, hidden};
    check_whole(projection, "projection", {sizes.weights(), sizes.token()}), check_whole(base, "base", {sizes.weights()});
    check_whole(scale, "scale", {3});
    if (norm.weight) check_whole(*norm.weight, "the input's norm", {hidden});
    const float* weights = projection.const_data_ptr<float>();
    for_float_type(streams, "streams", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const Mixer<T> mixer(streams, update, norm, base.const_data_ptr<float>(), scale.const_data_ptr<float>(), mix);
        at::parallel_for(0, padded(num_rows, BLOCK_TOKENS) / BLOCK_TOKENS, 4, [&](int64_t begin, int64_t end) {
            const int64_t first = begin * BLOCK_TOKENS, last = std::min(end * BLOCK_TOKENS, num_rows);
            const auto run = [&](auto products) {
                mixer.run(products, first, last, iterations, static_cast<float>(eps), static_cast<float>(norm_eps));
            };
#if defined(LONGPREFILL_AMX)
            if constexpr (std::is_same_v<T, Bf16>)
                if (SplitProducts::suits(sizes, num_rows)) return run(SplitProducts(weights, sizes));
#endif
            run(WideProducts(weights, sizes));
        });
    });
    return mix;
}

Mix hyper_mix(const at::Tensor& streams, const at::Tensor& projection, const at::Tensor& base, const at::Tensor& scale,
              int64_t iterations, double eps, double norm_eps, const std::optional<at::Tensor>& input_norm,
              double input_eps) {
    return mixed(streams, Update{nullptr, nullptr, nullptr}, InputNorm{input_norm, input_eps}, projection, base, scale,
                 iterations, eps, norm_eps);
}

// The update is written over the streams.
Mix hyper_update_mix(const at::Tensor& streams, const at::Tensor& output, const at::Tensor& post, const at::Tensor& comb,
                     const at::Tensor& projection, const at::Tensor& base, const at::Tensor& scale, int64_t iterations,
                     double eps, double norm_eps, const std::optional<at::Tensor>& input_norm, double input_eps) {
    check_update(streams, output, post, comb);
    return mixed(streams, Update{&output, &post, &comb}, InputNorm{input_norm, input_eps}, projection, base, scale,
                 iterations, eps, norm_eps);
}

template <bool MEAN>
at::Tensor updated(const at::Tensor& streams, const at::Tensor& output, const at::Tensor& post,
                   const at::Tensor& comb) {
    check_update(streams, output, post, comb);
    const int64_t num_rows = streams.size(0), num_streams = streams.size(1), hidden = streams.size(2);
    at::Tensor out = MEAN ? at::empty({num_rows, hidden}, streams.options()) : at::empty(streams.sizes(), streams.options());
    const float *post_data = post.const_data_ptr<float>(), *comb_data = comb.const_data_ptr<float>();
    const int64_t out_size = MEAN ? hidden : num_streams * hidden;
    for_float_type(streams, "streams", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T *data = streams.const_data_ptr<T>(), *added = output.const_data_ptr<T>();
        T* out_data = out.mutable_data_ptr<T>();
        at::parallel_for(0, num_rows, 8, [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; ++t) {
                const T *token = data + t * num_streams * hidden, *row = added + t * output.stride(0);
                const float* token_post = post_data + t * num_streams;
                const float* token_comb = comb_data + t * num_streams * num_streams;
                T* to = out_data + t * out_size;
                if (num_streams == 4)
                    update_token<4, MEAN>(token, row, token_post, token_comb, 4, hidden, to);
                else
                    update_token<0, MEAN>(token, row, token_post, token_comb, num_streams, hidden, to);
            }
        });
    });
    return out;
}

LONGPREFILL_OPS(hyper, m) {
    m.def("hyper_mix(Tensor streams, Tensor projection, Tensor base, Tensor scale, int iterations, float eps, "
          "float norm_eps, Tensor? input_norm, float input_eps) -> (Tensor, Tensor, Tensor)",
          TORCH_FN(hyper_mix));
    m.def("hyper_update(Tensor streams, Tensor output, Tensor post, Tensor comb) -> Tensor", TORCH_FN(updated<false>));
    m.def("hyper_final(Tensor streams, Tensor output, Tensor post, Tensor comb) -> Tensor", TORCH_FN(updated<true>));
    m.def("hyper_update_mix(Tensor(a!) streams, Tensor output, Tensor post, Tensor comb, Tensor projection, Tensor base, "
          "Tensor scale, int iterations, float eps, float norm_eps, Tensor? input_norm, float input_eps) -> "
          "(Tensor, Tensor, Tensor)",
          TORCH_FN(hyper_update_mix));
}

}  // namespace
}  // namespace longprefill
