// Latent attention in the expanded form, dense or over selected rows: causal, bf16 products on AMX.
//
// Selected rows are a mask over dense blocks: more products than the absorbed form makes, but of a shape that the machine
// likes, with nothing gathered.
//
// T queries, H heads, K keys of a block, N nope dim, P rope dim, R latent rank, V value dim; a padded size is a multiple
// of 32. Rows are packed once for all heads of a turn, in pairs along their width. Then a head's keys come out of
// W_UK c^T as [N, K] and its values out of c W_UV^T as [K, V]: neighbouring rows of both, joined to pairs, are the right
// operand of the next product, and nothing is ever transposed.
#include <algorithm>
#include <cmath>
#include <optional>

#include "longprefill/amx.h"
#include "longprefill/buffer.h"
#include "longprefill/rows.h"
#include "softmax.h"

namespace longprefill {
namespace {

#if defined(LONGPREFILL_AMX)

constexpr int64_t QUERIES = 64, KEYS = 512;  // of a block
constexpr int64_t SPAN = 4096;                // keys whose rows are packed at a time

struct MlaShape {
    int64_t queries, heads, nope, rope, rank, value, start;
    int64_t padded_nope, padded_rope, padded_rank, padded_value, padded_queries;

    int64_t num_keys() const { return start + queries; }
    int64_t depth() const { return padded_nope + padded_rope; }
    int64_t row() const { return padded_rank + padded_rope; }
};

// Rows [begin, end) of a small matrix into a zeroed one with longer rows.
void copy_rows(const Bf16* from, int64_t from_row, int64_t count, int64_t width, Bf16* to, int64_t to_row) {
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(static_cast<void*>(to + i * to_row), from + i * from_row, width * sizeof(Bf16));
}

// Rows of the cache as left operand [keys, row] and, block by block, as right operand [row / 2, KEYS] of pairs. The
// rope part starts at a padded place; what is padded is zero.
class Span {
public:
    explicit Span(const MlaShape& shape)
        : shape_(shape), rows_(Buffer<Bf16>::zeros(SPAN * shape.row())), packed_(Buffer<Bf16>(SPAN * shape.row())),
          wide_(Buffer<Bf16>(shape.rank + shape.rope)) {}

    void read(const Rows& rows, int64_t begin, int64_t count) {
        const int64_t row = shape_.row();
        for (int64_t i = 0; i < count; ++i) {
            rows.decode(begin + i, wide_.get());
            copy_rows(wide_.get(), 0, 1, shape_.rank, rows_.get() + i * row, row);
            copy_rows(wide_.get() + shape_.rank, 0, 1, shape_.rope, rows_.get() + i * row + shape_.padded_rank, row);
        }
        const int64_t whole = padded(count, KEYS);
        std::memset(static_cast<void*>(rows_.get() + count * row), 0, (whole - count) * row * sizeof(Bf16));
        for (int64_t i = 0; i < whole; i += 16)
            pack_sixteen_rows(rows_.get() + i * row, row, row, packed_.get() + i / KEYS * KEYS * row, KEYS, i % KEYS);
    }

    const Bf16* rows(int64_t key) const { return rows_.get() + key * shape_.row(); }
    const Bf16* latents(int64_t key) const { return packed_.get() + key * shape_.row(); }
    const Bf16* rope(int64_t key) const { return latents(key) + shape_.padded_rank * KEYS; }

private:
    const MlaShape& shape_;
    Buffer<Bf16> rows_, packed_, wide_;
};

// One bit a key for each query, rows padded to whole blocks of keys; or none.
struct Mask {
    const uint8_t* bits;
    int64_t row_bytes;

    explicit operator bool() const { return bits != nullptr; }
    LP_INLINE const uint8_t* row(int64_t query, int64_t key) const {
        return bits == nullptr ? nullptr : bits + query * row_bytes + key / 8;
    }
};

// The keys of a block that a query sees: the first `count`, or those of them that it selects.
struct Seen {
    int64_t count;
    const uint8_t* selected;

    LP_INLINE __mmask16 lanes(int64_t key) const {
        const int64_t left = count - key;
        const __mmask16 inside = left >= 16 ? 0xffff : (left <= 0 ? 0 : (1u << left) - 1);
        if (selected == nullptr) return inside;
        uint16_t chosen;
        std::memcpy(&chosen, selected + key / 8, 2);
        return inside & chosen;
    }
};

// One head at work: its queries and weights, a block's keys and values.
class Head {
public:
    explicit Head(const MlaShape& shape)
        : shape_(shape), q_(Buffer<Bf16>::zeros(shape.padded_queries * shape.depth())),
          w_uk_(Buffer<Bf16>::zeros(shape.padded_nope * shape.padded_rank)),
          w_uv_(Buffer<Bf16>::zeros(shape.padded_value * shape.padded_rank)),
          w_uv_packed_(Buffer<Bf16>(shape.padded_value * shape.padded_rank)),
          keys_(Buffer<Bf16>(shape.depth() * KEYS)), values_(Buffer<Bf16>(KEYS * shape.padded_value)),
          expanded_(Buffer<float>(std::max(shape.padded_nope, shape.padded_value) * KEYS)),
          logits_(Buffer<float>(QUERIES * KEYS)), weights_(Buffer<Bf16>(QUERIES * KEYS)) {}

    void take(const Bf16* q, const Bf16* w_uk, const Bf16* w_uv) {
        const int64_t query = shape_.nope + shape_.rope, stride = shape_.heads * query;
        copy_rows(q, stride, shape_.queries, shape_.nope, q_.get(), shape_.depth());
        copy_rows(q + shape_.nope, stride, shape_.queries, shape_.rope, q_.get() + shape_.padded_nope, shape_.depth());
        copy_rows(w_uk, shape_.rank, shape_.nope, shape_.rank, w_uk_.get(), shape_.padded_rank);
        copy_rows(w_uv, shape_.rank, shape_.value, shape_.rank, w_uv_.get(), shape_.padded_rank);
        for (int64_t v = 0; v < shape_.padded_value; v += 16)
            pack_sixteen_rows(w_uv_.get() + v * shape_.padded_rank, shape_.padded_rank, shape_.padded_rank,
                              w_uv_packed_.get(), shape_.padded_value, v);
    }

    // Keys and values of the block that begins at `key` of the span.
    void expand(const Span& span, int64_t key) {
        amx_multiply(shape_.padded_nope, KEYS, shape_.padded_rank, w_uk_.get(), shape_.padded_rank, span.latents(key),
                     KEYS, expanded_.get(), KEYS, false);
        pair_rows(shape_.padded_nope, KEYS, keys_.get());
        std::memcpy(static_cast<void*>(keys_.get() + shape_.padded_nope * KEYS), span.rope(key),
                    shape_.padded_rope * KEYS * sizeof(Bf16));
        amx_multiply(KEYS, shape_.padded_value, shape_.padded_rank, span.rows(key), shape_.row(), w_uv_packed_.get(),
                     shape_.padded_value, expanded_.get(), shape_.padded_value, false);
        has_finite_values_ = pair_rows(KEYS, shape_.padded_value, values_.get());
    }

    // Adds the block of keys from position `key` on to the sums of queries [first, last): out [queries, V], their
    // maxima and the sums of their weights. `mask`: what the first query selects of the block; null: all that it sees.
    void add(int64_t first, int64_t last, int64_t key, float scale, const Mask& mask, float* out, float* max,
             float* sum) {
        const int64_t position = shape_.start + first, num_rows = padded(last - first, 32);
        const int64_t used = std::min(KEYS, padded(position + (last - first) - key, 128));
        amx_multiply(num_rows, used, shape_.depth(), q_.get() + first * shape_.depth(), shape_.depth(), keys_.get(),
                     KEYS, logits_.get(), KEYS, false);
        for (int64_t i = 0; i < last - first; ++i) {
            const Seen seen{std::clamp<int64_t>(position + i + 1 - key, 0, used), mask.row(first + i, key)};
            soften(i, seen, used, scale * LOG2_E, out + i * shape_.padded_value, max[i], sum[i]);
        }
        std::memset(static_cast<void*>(weights_.get() + (last - first) * KEYS), 0,
                    (num_rows - (last - first)) * KEYS * sizeof(Bf16));
        if (!has_finite_values_ && (mask || position + 1 - key < used))
            return add_seen_only(first, last, key, mask, out);
        amx_multiply(num_rows, shape_.padded_value, used, weights_.get(), KEYS, values_.get(), shape_.padded_value, out,
                     shape_.padded_value, true);
    }

private:
    // Rows 2 i and 2 i + 1 of `expanded_` side by side as bf16; false if a number is not finite.
    bool pair_rows(int64_t count, int64_t width, Bf16* to) const {
        __m512 check = _mm512_setzero_ps();
        for (int64_t i = 0; i < count; i += 2)
            for (int64_t c = 0; c < width; c += 16) {
                const __m512 a = _mm512_loadu_ps(expanded_.get() + i * width + c);
                const __m512 b = _mm512_loadu_ps(expanded_.get() + (i + 1) * width + c);
                check = _mm512_fmadd_ps(_mm512_sub_ps(a, a), _mm512_sub_ps(b, b), check);  // inf - inf is NaN
                _mm512_storeu_si512(to + i * width + 2 * c, to_bf16_pairs(a, b));
            }
        return _mm512_cmp_ps_mask(check, check, _CMP_UNORD_Q) == 0;
    }

    // A row of logits becomes weights of the keys that the query sees; the others become zero.
    LP_INLINE void soften(int64_t i, const Seen& seen, int64_t used, float factor, float* out, float& max, float& sum) {
        const float* logits = logits_.get() + i * KEYS;
        Bf16* weights = weights_.get() + i * KEYS;
        float total = 0.0f;
        if (max == NONE) {
            max = highest(logits, seen, factor);
            weigh(logits, seen, used, factor, base_of(max), weights, total);
        } else {  // a logit rarely passes the maximum so far: try with it
            const float top = weigh(logits, seen, used, factor, max, weights, total);
            if (top > max + MARGIN) {
                const __m512 decay = _mm512_set1_ps(std::exp2(max - top));
                sum *= _mm512_cvtss_f32(decay);
                max = top;
                for (int64_t c = 0; c < shape_.padded_value; c += 16)
                    _mm512_storeu_ps(out + c, _mm512_mul_ps(_mm512_loadu_ps(out + c), decay));
                weigh(logits, seen, used, factor, max, weights, total);
            }
        }
        sum += total;
    }

    static float highest(const float* logits, const Seen& seen, float factor) {
        __m512 top = _mm512_set1_ps(NONE);
        for (int64_t k = 0; k < seen.count; k += 16)
            top = _mm512_mask_max_ps(top, seen.lanes(k),
                                     _mm512_mul_ps(_mm512_loadu_ps(logits + k), _mm512_set1_ps(factor)), top);
        return _mm512_reduce_max_ps(top);
    }

    // Weights relative to `base`, their sum, and the highest logit.
    LP_INLINE static float weigh(const float* logits, const Seen& seen, int64_t used, float factor, float base,
                                 Bf16* weights, float& total) {
        const __m512 scale = _mm512_set1_ps(factor), shift = _mm512_set1_ps(-base);
        __m512 top[2] = {_mm512_set1_ps(NONE), _mm512_set1_ps(NONE)}, sums[2] = {};
        int64_t k = 0;
        for (; seen.selected == nullptr && k + 32 <= seen.count; k += 32) {
            const __m512 a = _mm512_fmadd_ps(_mm512_loadu_ps(logits + k), scale, shift);
            const __m512 b = _mm512_fmadd_ps(_mm512_loadu_ps(logits + k + 16), scale, shift);
            top[0] = _mm512_max_ps(a, top[0]), top[1] = _mm512_max_ps(b, top[1]);
            const __m512 x = power_of_two(a), y = power_of_two(b);
            sums[0] = _mm512_add_ps(sums[0], x), sums[1] = _mm512_add_ps(sums[1], y);
            _mm512_storeu_si512(weights + k, to_bf16(x, y));
        }
        for (; k < used; k += 32) {
            __m512 some[2];
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const __mmask16 lanes = seen.lanes(k + 16 * half);
                const __m512 a = _mm512_fmadd_ps(_mm512_loadu_ps(logits + k + 16 * half), scale, shift);
                top[half] = _mm512_mask_max_ps(top[half], lanes, a, top[half]);
                some[half] = _mm512_maskz_mov_ps(lanes, power_of_two(a));
                sums[half] = _mm512_add_ps(sums[half], some[half]);
            }
            _mm512_storeu_si512(weights + k, to_bf16(some[0], some[1]));
        }
        total = _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
        return _mm512_reduce_max_ps(_mm512_max_ps(top[0], top[1])) + base;
    }

    // The product with values of which some are not finite: weight 0 would not silence them. Number by number.
    void add_seen_only(int64_t first, int64_t last, int64_t key, const Mask& mask, float* out) {
        for (int64_t i = 0; i < last - first; ++i) {
            const Seen seen{std::min(KEYS, shape_.start + first + i + 1 - key), mask.row(first + i, key)};
            for (int64_t k = 0; k < seen.count; ++k)
                for (int64_t v = 0; v < shape_.padded_value && (seen.lanes(k / 16 * 16) >> k % 16 & 1); ++v)
                    out[i * shape_.padded_value + v] +=
                        static_cast<float>(weights_[i * KEYS + k]) *
                        static_cast<float>(values_[(k / 2 * shape_.padded_value + v) * 2 + k % 2]);
        }
    }

    const MlaShape& shape_;
    bool has_finite_values_ = true;
    Buffer<Bf16> q_, w_uk_, w_uv_, w_uv_packed_, keys_, values_;
    Buffer<float> expanded_, logits_;
    Buffer<Bf16> weights_;
    AmxProducts release_;
};

// Sums of the heads of one turn, over the keys so far.
struct State {
    Buffer<float> out, max, sum;

    State(const MlaShape& shape, int64_t heads)
        : out(heads * shape.padded_queries * shape.padded_value), max(heads * shape.padded_queries),
          sum(heads * shape.padded_queries) {
        std::fill_n(out.get(), heads * shape.padded_queries * shape.padded_value, 0.0f);
        std::fill_n(max.get(), heads * shape.padded_queries, NONE);
        std::fill_n(sum.get(), heads * shape.padded_queries, 0.0f);
    }
};

// The bits of selected positions, uint8 [T, row_bytes]: int32 [T, S] with -1 anywhere.
Buffer<uint8_t> mask_bits(const at::Tensor& indices, int64_t num_keys, int64_t row_bytes) {
    const int64_t places = indices.size(1);
    const int32_t* positions = indices.const_data_ptr<int32_t>();
    Buffer<uint8_t> bits = Buffer<uint8_t>::zeros(indices.size(0) * row_bytes);
    for (int64_t t = 0; t < indices.size(0); ++t)
        for (int64_t i = 0; i < places; ++i) {
            const int32_t position = positions[t * places + i];
            TORCH_CHECK_VALUE(position < num_keys, "index ", position, " of ", num_keys,
                              " visible rows: select only visible positions");
            if (position >= 0) bits[t * row_bytes + position / 8] |= 1 << position % 8;
        }
    return bits;
}

// [T, H, V] bf16. q bf16 [T, H, N + P], w_uk [H, N, R], w_uv [H, V, R]; `indices` as of mask_bits, or none. Heads take
// turns: as many at once as have sums of `state_bytes`, for which rows are packed once.
at::Tensor mla_expanded(const at::Tensor& q, const at::Tensor& pages, const at::Tensor& table, int64_t num_rows,
                     int64_t format, int64_t format_rank, const at::Tensor& w_uk, const at::Tensor& w_uv,
                     const std::optional<at::Tensor>& indices, int64_t start, double scale, int64_t state_bytes) {
    check_dim(q, "q", 3), check_contiguous(q, "q");
    check_rows_contiguous(w_uk, "w_uk"), check_rows_contiguous(w_uv, "w_uv");  // heads may be apart: parts of one weight
    check_shape(w_uk, "w_uk", {q.size(1), w_uk.size(1), w_uk.size(2)});
    check_shape(w_uv, "w_uv", {q.size(1), w_uv.size(1), w_uk.size(2)});
    MlaShape shape{};
    shape.queries = q.size(0), shape.heads = q.size(1), shape.start = start;
    shape.nope = w_uk.size(1), shape.rank = w_uk.size(2), shape.value = w_uv.size(1);
    shape.rope = q.size(2) - shape.nope;
    shape.padded_nope = padded(shape.nope, AMX_DEPTH), shape.padded_rope = padded(shape.rope, AMX_DEPTH);
    shape.padded_rank = padded(shape.rank, AMX_DEPTH), shape.padded_value = padded(shape.value, 32);
    shape.padded_queries = padded(shape.queries, 32);
    const Rows rows(pages, table, num_rows, shape.rank + shape.rope, format_rank, format);
    at::Tensor out = at::empty({shape.queries, shape.heads, shape.value}, q.options());
    const Bf16 *q_data = q.const_data_ptr<Bf16>(), *w_uk_data = w_uk.const_data_ptr<Bf16>(),
               *w_uv_data = w_uv.const_data_ptr<Bf16>();
    Bf16* out_data = out.mutable_data_ptr<Bf16>();
    Mask mask{nullptr, padded(shape.num_keys(), KEYS) / 8};
    Buffer<uint8_t> bits;
    if (indices) {
        check_whole(*indices, "indices", {shape.queries, indices->size(1)});
        bits = mask_bits(*indices, shape.num_keys(), mask.row_bytes);
        mask.bits = bits.get();
    }
    const int64_t state = shape.padded_queries * shape.padded_value;
    const int64_t turn = std::clamp<int64_t>(state_bytes / (state * 4), 1, shape.heads);
    Span span(shape);
    for (int64_t begin = 0; begin < shape.heads; begin += turn) {
        const int64_t end = std::min(begin + turn, shape.heads);
        const State sums(shape, end - begin);
        for (int64_t from = 0; from < shape.num_keys(); from += SPAN) {
            const int64_t count = std::min(SPAN, shape.num_keys() - from);
            span.read(rows, from, count);
            at::parallel_for(begin, end, 1, [&](int64_t first_head, int64_t last_head) {
                Head head(shape);
                for (int64_t h = first_head; h < last_head; ++h) {
                    head.take(q_data + h * (shape.nope + shape.rope), w_uk_data + h * w_uk.stride(0),
                              w_uv_data + h * w_uv.stride(0));
                    float* head_out = sums.out.get() + (h - begin) * state;
                    float* head_max = sums.max.get() + (h - begin) * shape.padded_queries;
                    float* head_sum = sums.sum.get() + (h - begin) * shape.padded_queries;
                    for (int64_t key = 0; key < count; key += KEYS) {
                        head.expand(span, key);
                        // The first queries may see nothing of this block.
                        const int64_t sees = std::max<int64_t>(0, from + key - start) / QUERIES * QUERIES;
                        for (int64_t first = sees; first < shape.queries; first += QUERIES)
                            head.add(first, std::min(first + QUERIES, shape.queries), from + key,
                                     static_cast<float>(scale), mask, head_out + first * shape.padded_value,
                                     head_max + first, head_sum + first);
                    }
                }
            });
        }
        for (int64_t t = 0; t < shape.queries; ++t) {
            const bool sees = sees_some(indices, t);
            for (int64_t h = begin; h < end; ++h) {
                const int64_t at = (h - begin) * shape.padded_queries + t;
                const Vec share = splat(sees ? 1.0f / sums.sum[at] : 0.0f);
                for_each_vector(shape.value, [&](int64_t c, int size) {
                    store_some(out_data + (t * shape.heads + h) * shape.value + c,
                               load(sums.out.get() + at * shape.padded_value + c) * share, size);
                });
            }
        }
    }
    return out;
}
#endif

bool mla_has_expanded() {
#if defined(LONGPREFILL_AMX)
    return has_amx_products();
#else
    return false;
#endif
}

LONGPREFILL_OPS(mla_expanded, m) {
    m.def("mla_has_expanded() -> bool", TORCH_FN(mla_has_expanded));
#if defined(LONGPREFILL_AMX)
    m.def("mla_expanded(Tensor q, Tensor pages, Tensor table, int num_rows, int format, int format_rank, Tensor w_uk, "
          "Tensor w_uv, Tensor? indices, int start, float scale, int state_bytes) -> Tensor",
          TORCH_FN(mla_expanded));
#endif
}

}  // namespace
}  // namespace longprefill
