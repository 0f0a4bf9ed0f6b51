// Latent attention in the expanded form, dense or over selected rows, in fp32 products: for processors without a matrix
// unit.
//
// T queries, H heads, K keys of a block, N nope dim, P rope dim, R latent rank, V value dim. STRIPE queries lie side by
// side from their dot products to their output: softmax then works on whole vectors, its maxima and sums never cross
// lanes, and what it writes is the right operand of the next product as it lies. Keys come out of c W_UK^T row by row,
// values out of W_UV c^T transposed: both are left operands as they are stored.
#include <algorithm>
#include <optional>

#include "longprefill/buffer.h"
#include "longprefill/rows.h"
#include "longprefill/stripes.h"
#include "softmax.h"

namespace longprefill {
namespace {

typedef std::conditional_t<(STRIPE > 32), uint64_t, uint32_t> LaneBits;  // one a query of a stripe

struct StripeShape {
    static constexpr int64_t KEYS = 240;   // of a block: a multiple of every STRIPE and STRIPE_ROWS
    static constexpr int64_t SPAN = 1920;  // keys whose rows are decoded at a time

    int64_t queries, heads, nope, rope, rank, value, start;

    int64_t num_keys() const { return start + queries; }
    int64_t depth() const { return nope + rope; }
    int64_t stripes() const { return num_stripes(queries); }
    int64_t padded_nope() const { return num_stripes(nope) * STRIPE; }
    int64_t padded_value() const { return padded(value, STRIPE_ROWS); }
    // Rows of a block's keys: products are stored in whole stripes, so they end where the rope begins or in it.
    int64_t key_row() const { return std::max(padded_nope(), nope + rope); }
};

// Cached rows of a span of keys: the latents row by row and in stripes of keys, the rope part row by row.
class SpanRows {
public:
    explicit SpanRows(const StripeShape& shape)
        : shape_(shape), row_(shape.rank + shape.rope), rows_(StripeShape::SPAN * row_ + LANES),
          stripes_(StripeShape::SPAN * shape.rank) {}

    void read(const Rows& rows, int64_t begin, int64_t count) {
        constexpr int64_t KEYS = StripeShape::KEYS;
        for (int64_t i = 0; i < count; ++i) rows.decode(begin + i, rows_.get() + i * row_);
        const int64_t whole = padded(count, KEYS);
        std::fill_n(rows_.get() + count * row_, (whole - count) * row_, 0.0f);
        for (int64_t i = 0; i < whole; i += STRIPE)
            pack_rows(rows_.get() + i * row_, row_, STRIPE, shape_.rank, stripes_.get() + i * shape_.rank);
    }

    int64_t row() const { return row_; }
    const float* latents(int64_t key) const { return rows_.get() + key * row_; }
    const float* rope(int64_t key) const { return latents(key) + shape_.rank; }
    const float* stripe(int64_t key) const { return stripes_.get() + key * shape_.rank; }

private:
    const StripeShape& shape_;
    int64_t row_;
    Buffer<float> rows_, stripes_;
};

// For every stripe of queries and every key the queries that select it; or none, and all see what comes before them.
struct Selection {
    Buffer<LaneBits> bits;
    int64_t num_keys = 0;

    const LaneBits* of(int64_t stripe, int64_t key) const {
        return bits ? bits.get() + stripe * num_keys + key : nullptr;
    }
};

Selection selection_of(const at::Tensor& indices, const StripeShape& shape) {
    const int64_t places = indices.size(1), num_keys = padded(shape.num_keys(), StripeShape::KEYS);
    const int32_t* positions = indices.const_data_ptr<int32_t>();
    Selection selection{Buffer<LaneBits>::zeros(shape.stripes() * num_keys), num_keys};
    for (int64_t t = 0; t < shape.queries; ++t)
        for (int64_t i = 0; i < places; ++i) {
            const int32_t position = positions[t * places + i];
            TORCH_CHECK_VALUE(position < shape.num_keys(), "index ", position, " of ", shape.num_keys(),
                              " visible rows: select only visible positions");
            if (position >= 0) selection.bits[t / STRIPE * num_keys + position] |= LaneBits{1} << t % STRIPE;
        }
    return selection;
}

// Sums of one head over the keys so far: output transposed [stripes, V, STRIPE], maxima and sums of weights [stripes, STRIPE].
struct HeadSums {
    float *out, *max, *sum;
};

// One head at work.
template <typename T>
class StripeHead {
public:
    static constexpr int64_t KEYS = StripeShape::KEYS;

    explicit StripeHead(const StripeShape& shape)
        : shape_(shape), q_(shape.stripes() * shape.depth() * STRIPE), w_uk_(shape.padded_nope() * shape.rank),
          w_uv_(Buffer<float>::zeros(shape.padded_value() * shape.rank)), keys_(KEYS * shape.key_row()),
          values_(shape.padded_value() * KEYS), weights_(KEYS * STRIPE) {}

    void take(const T* q, const T* w_uk, const T* w_uv) {
        const int64_t depth = shape_.depth(), row = shape_.heads * depth;
        for (int64_t t = 0; t < shape_.queries; t += STRIPE)
            pack_rows(q + t * row, row, std::min<int64_t>(STRIPE, shape_.queries - t), depth, q_.get() + t * depth);
        for (int64_t n = 0; n < shape_.nope; n += STRIPE)
            pack_rows(w_uk + n * shape_.rank, shape_.rank, std::min<int64_t>(STRIPE, shape_.nope - n), shape_.rank,
                      w_uk_.get() + n * shape_.rank);
        for (int64_t v = 0; v < shape_.value; ++v)
            for_each_vector(shape_.rank, [&](int64_t r, int count) {
                store_some(w_uv_.get() + v * shape_.rank + r, load_some(w_uv + v * shape_.rank + r, count), count);
            });
    }

    // Keys and values of the block that begins at `key` of the span.
    void expand(const SpanRows& span, int64_t key) {
        for (int64_t n = 0; n < shape_.nope; n += STRIPE)
            for (int64_t k = 0; k < KEYS; k += STRIPE_ROWS) {
                StripeTile tile;
                tile.zero();
                tile.multiply_add(span.latents(key + k), span.row(), 1, w_uk_.get() + n * shape_.rank, STRIPE, shape_.rank);
                tile.store_to(keys_.get() + k * shape_.key_row() + n, shape_.key_row());
            }
        for (int64_t k = 0; k < KEYS; ++k)
            std::memcpy(keys_.get() + k * shape_.key_row() + shape_.nope, span.rope(key + k), shape_.rope * sizeof(float));
        Vec check{};
        for (int64_t k = 0; k < KEYS; k += STRIPE)
            for (int64_t v = 0; v < shape_.padded_value(); v += STRIPE_ROWS) {
                StripeTile tile;
                tile.zero();
                tile.multiply_add(w_uv_.get() + v * shape_.rank, shape_.rank, 1, span.stripe(key + k), STRIPE, shape_.rank);
                tile.store_to(values_.get() + v * KEYS + k, KEYS);
#pragma GCC unroll 8
                for (int i = 0; i < STRIPE_ROWS; ++i)
#pragma GCC unroll 4
                    for (int j = 0; j < STRIPE_VECS; ++j) check += tile.sums[i][j] - tile.sums[i][j];  // inf - inf is NaN
            }
        has_finite_values_ = sum(check) == 0.0f;
    }

    // Adds the block of keys from position `key` on to the sums of one stripe of queries. `selected`: which of them
    // select each key; null: all that see it.
    void add(int64_t stripe, int64_t key, float scale, const LaneBits* selected, const HeadSums& sums) {
        const int64_t first = shape_.start + stripe * STRIPE;  // its first query's position
        const int64_t used = std::min(KEYS, padded(first + STRIPE - key, STRIPE_ROWS));
        for (int64_t k = 0; k < used; k += STRIPE_ROWS) {
            StripeTile tile;
            tile.zero();
            tile.multiply_add(keys_.get() + k * shape_.key_row(), shape_.key_row(), 1,
                              q_.get() + stripe * STRIPE * shape_.depth(), STRIPE, shape_.depth());
            tile.store_to(weights_.get() + k * STRIPE, STRIPE);
        }
        float* out = sums.out + stripe * shape_.padded_value() * STRIPE;
        const bool all_see = selected == nullptr && key + used <= first + 1;
        // Which of the queries [lane, lane + LANES) see key k.
        const auto before = [&](int64_t k, int64_t lane) __attribute__((always_inline)) -> IntVec {
            return static_cast<int32_t>(k) <= lane_numbers() + static_cast<int32_t>(first - key + lane);
        };
        const auto chosen = [&](int64_t k, int64_t lane) __attribute__((always_inline)) -> IntVec {
            return (static_cast<int32_t>(selected[k] >> lane) & (1 << lane_numbers())) != 0;
        };
#pragma GCC unroll 4
        for (int64_t lane = 0; lane < STRIPE; lane += LANES) {
            float *max = sums.max + stripe * STRIPE + lane, *sum = sums.sum + stripe * STRIPE + lane;
            if (all_see) soften(lane, used, scale, [](int64_t, Vec x) { return x; }, max, sum, out);
            else if (selected == nullptr)
                soften(lane, used, scale, [&](int64_t k, Vec x) { return before(k, lane) ? x : splat(NONE); }, max, sum, out);
            else
                soften(lane, used, scale, [&](int64_t k, Vec x) { return chosen(k, lane) ? x : splat(NONE); }, max, sum, out);
        }
        if (!has_finite_values_ && !all_see)
            return selected == nullptr ? add_seen_only(used, before, out) : add_seen_only(used, chosen, out);
        for (int64_t v = 0; v < shape_.padded_value(); v += STRIPE_ROWS) {
            StripeTile tile;
            tile.load_from(out + v * STRIPE, STRIPE);
            tile.multiply_add(values_.get() + v * KEYS, KEYS, 1, weights_.get(), STRIPE, used);
            tile.store_to(out + v * STRIPE, STRIPE);
        }
    }

private:
    LP_INLINE static IntVec lane_numbers() {
        IntVec numbers;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) numbers[i] = i;
        return numbers;
    }

    // Logits of LANES queries become weights; what was summed before is scaled to the new maximum. `seen(k, x)` is x, or
    // NONE for lanes that do not see key k.
    template <typename Seen>
    LP_INLINE void soften(int64_t lane, int64_t used, float scale, Seen seen, float* max_at, float* sum_at, float* out) {
        float* weights = weights_.get() + lane;
        const Vec factor = splat(scale), before = load(max_at);
        Vec highest = before;
        for (int64_t k = 0; k < used; ++k) highest = max(seen(k, load(weights + k * STRIPE) * factor), highest);
        const Vec decay = before == highest ? splat(1.0f) : exp(before - highest), base = base_of(highest);
        Vec total = load(sum_at) * decay;
        for (int64_t k = 0; k < used; ++k) {
            const Vec weight = exp(seen(k, load(weights + k * STRIPE) * factor) - base);
            total += weight;
            store(weights + k * STRIPE, weight);
        }
        store(max_at, highest);
        store(sum_at, total);
        for (int i = 0; i < LANES; ++i)
            if (decay[i] != 1.0f) {
                for (int64_t v = 0; v < shape_.padded_value(); ++v)
                    store(out + v * STRIPE + lane, load(out + v * STRIPE + lane) * decay);
                break;
            }
    }

    // The product with values of which some are not finite: weight 0 would not silence them.
    template <typename Sees>
    LP_NOINLINE void add_seen_only(int64_t used, Sees sees, float* out) const {
        for (int64_t v = 0; v < shape_.padded_value(); ++v)
            for (int64_t k = 0; k < used; ++k)
                for (int64_t lane = 0; lane < STRIPE; lane += LANES) {
                    const Vec product = load(weights_.get() + k * STRIPE + lane) * values_[v * KEYS + k];
                    float* to = out + v * STRIPE + lane;
                    store(to, load(to) + (sees(k, lane) ? product : Vec{}));
                }
    }

    const StripeShape& shape_;
    bool has_finite_values_ = true;
    Buffer<float> q_, w_uk_, w_uv_, keys_, values_, weights_;
};

template <typename T>
void attend_expanded(const StripeShape& shape, const at::Tensor& q, const Rows& rows, const at::Tensor& w_uk,
                     const at::Tensor& w_uv, const std::optional<at::Tensor>& indices, double scale, int64_t state_bytes,
                     at::Tensor& out) {
    const Selection selection = indices ? selection_of(*indices, shape) : Selection{};
    const T *q_data = q.const_data_ptr<T>(), *w_uk_data = w_uk.const_data_ptr<T>(), *w_uv_data = w_uv.const_data_ptr<T>();
    T* out_data = out.mutable_data_ptr<T>();
    const int64_t lanes = shape.stripes() * STRIPE, state = lanes * shape.padded_value();
    const int64_t turn = std::clamp<int64_t>(state_bytes / (state * 4), 1, shape.heads);
    SpanRows span(shape);
    for (int64_t begin = 0; begin < shape.heads; begin += turn) {
        const int64_t end = std::min(begin + turn, shape.heads);
        const Buffer<float> outs = Buffer<float>::zeros((end - begin) * state);
        const Buffer<float> maxima((end - begin) * lanes), sums = Buffer<float>::zeros((end - begin) * lanes);
        std::fill_n(maxima.get(), (end - begin) * lanes, NONE);
        for (int64_t from = 0; from < shape.num_keys(); from += StripeShape::SPAN) {
            const int64_t count = std::min(StripeShape::SPAN, shape.num_keys() - from);
            span.read(rows, from, count);
            at::parallel_for(begin, end, 1, [&](int64_t first_head, int64_t last_head) {
                StripeHead<T> head(shape);
                for (int64_t h = first_head; h < last_head; ++h) {
                    head.take(q_data + h * shape.depth(), w_uk_data + h * w_uk.stride(0), w_uv_data + h * w_uv.stride(0));
                    const HeadSums own{outs.get() + (h - begin) * state, maxima.get() + (h - begin) * lanes,
                                       sums.get() + (h - begin) * lanes};
                    for (int64_t key = 0; key < count; key += StripeShape::KEYS) {
                        head.expand(span, key);
                        // The first queries may see nothing of this block.
                        const int64_t sees = std::max<int64_t>(0, from + key - shape.start) / STRIPE;
                        for (int64_t stripe = sees; stripe < shape.stripes(); ++stripe)
                            head.add(stripe, from + key, static_cast<float>(scale), selection.of(stripe, from + key), own);
                    }
                }
            });
        }
        for (int64_t h = begin; h < end; ++h)
            for (int64_t t = 0; t < shape.queries; ++t) {
                const float share = sees_some(indices, t) ? 1.0f / sums[(h - begin) * lanes + t] : 0.0f;
                const float* from = outs.get() + (h - begin) * state + t / STRIPE * STRIPE * shape.padded_value() + t % STRIPE;
                T* to = out_data + (t * shape.heads + h) * shape.value;
                for (int64_t v = 0; v < shape.value; ++v) to[v] = T(from[v * STRIPE] * share);
            }
    }
}

// [T, H, V] in q's dtype: q fp32 or bf16 [T, H, N + P], w_uk [H, N, R], w_uv [H, V, R]; `indices` int32 [T, S] with -1
// anywhere, or none. Heads take turns: as many at once as have sums of `state_bytes`, for which rows are read once.
at::Tensor mla_expanded_fp32(const at::Tensor& q, const at::Tensor& pages, const at::Tensor& table, int64_t num_rows,
                             int64_t format, int64_t format_rank, const at::Tensor& w_uk, const at::Tensor& w_uv,
                             const std::optional<at::Tensor>& indices, int64_t start, double scale, int64_t state_bytes) {
    check_dim(q, "q", 3), check_contiguous(q, "q");
    check_rows_contiguous(w_uk, "w_uk"), check_rows_contiguous(w_uv, "w_uv");  // heads may be apart: parts of one weight
    check_shape(w_uk, "w_uk", {q.size(1), w_uk.size(1), w_uk.size(2)});
    check_shape(w_uv, "w_uv", {q.size(1), w_uv.size(1), w_uk.size(2)});
    TORCH_CHECK_VALUE(w_uk.scalar_type() == q.scalar_type() && w_uv.scalar_type() == q.scalar_type(), "q is ",
                      q.scalar_type(), ", w_uk ", w_uk.scalar_type(), ", w_uv ", w_uv.scalar_type(), ": give one dtype");
    StripeShape shape{};
    shape.queries = q.size(0), shape.heads = q.size(1), shape.start = start;
    shape.nope = w_uk.size(1), shape.rank = w_uk.size(2), shape.value = w_uv.size(1);
    shape.rope = q.size(2) - shape.nope;
    const Rows rows(pages, table, num_rows, shape.rank + shape.rope, format_rank, format);
    if (indices) check_whole(*indices, "indices", {shape.queries, indices->size(1)});
    at::Tensor out = at::empty({shape.queries, shape.heads, shape.value}, q.options());
    for_float_type(q, "q", [&](auto* type) {
        attend_expanded<std::remove_pointer_t<decltype(type)>>(shape, q, rows, w_uk, w_uv, indices, scale, state_bytes, out);
    });
    return out;
}

// torch's own products are as fast on AVX-512.
bool mla_has_expanded_fp32() { return LANES < 16; }

LONGPREFILL_OPS(mla_expanded_fp32, m) {
    m.def("mla_has_expanded_fp32() -> bool", TORCH_FN(mla_has_expanded_fp32));
    m.def("mla_expanded_fp32(Tensor q, Tensor pages, Tensor table, int num_rows, int format, int format_rank, Tensor w_uk, "
          "Tensor w_uv, Tensor? indices, int start, float scale, int state_bytes) -> Tensor",
          TORCH_FN(mla_expanded_fp32));
}

}  // namespace
}  // namespace longprefill
