// Lightning indexer: scores of a block of keys for a block of queries, straight into each query's running best.
//
// T queries, I heads, X width (padded), K keys of a block. A task is a block of queries: it packs every block of keys
// once, in the layout of its products, and no score outlives its block.
#include <vector>

#include "best.h"
#include "longprefill/amx.h"
#include "longprefill/buffer.h"
#include "longprefill/rows.h"
#include "longprefill/stripes.h"

namespace longprefill {
namespace {

constexpr int64_t LIST_BYTES = 8 << 20;  // running lists of one task
constexpr int64_t QUERY_BLOCK = 128;     // queries of a task: packing a key block costs them about 2 %

struct Problem {
    const at::Tensor &q, &w;
    const Rows& keys;
    int64_t start, pool, places;

    int64_t num_heads() const { return q.size(1); }
    // Keys that query t sees: tokens, or pools whose last token it sees.
    int64_t visible(int64_t t) const { return (start + t + 1) / pool; }
};

// fp32 products in registers: STRIPE_ROWS heads by STRIPE keys, summed over the heads without ever being stored.
class Fp32Scorer {
public:
    static constexpr int64_t BLOCK = 240, GROUP = 1;

    Fp32Scorer(const Problem& p, int64_t first, int64_t last)
        : heads_(p.num_heads()), padded_heads_(padded(heads_, STRIPE_ROWS)), width_(p.q.size(2)),
          q_(Buffer<float>::zeros((last - first) * padded_heads_ * width_)), k_(width_ * BLOCK),
          rows_(STRIPE * width_ + LANES),
          w_(p.w.const_data_ptr<float>() + first * heads_) {
        for_float_type(p.q, "q", [&](auto* type) {
            const auto* from = p.q.const_data_ptr<std::remove_pointer_t<decltype(type)>>() + first * heads_ * width_;
            for (int64_t t = 0; t < last - first; ++t)
                for (int64_t i = 0; i < heads_ * width_; ++i)
                    q_[t * padded_heads_ * width_ + i] = static_cast<float>(from[t * heads_ * width_ + i]);
        });
    }

    void pack(const Rows& keys, int64_t begin, int64_t count) {
        for (int64_t n = 0; n < count; n += STRIPE) {
            const int64_t present = std::min<int64_t>(STRIPE, count - n);
            for (int64_t i = 0; i < present; ++i) keys.decode(begin + n + i, rows_.get() + i * width_);
            pack_rows(rows_.get(), width_, present, width_, k_.get() + n * width_);
        }
    }

    // Scores of `count` keys of the block for query t of the task.
    void score(int64_t t, int64_t, int64_t count, float* scores) const {
        const float *q = q_.get() + t * padded_heads_ * width_, *w = w_ + t * heads_;
        for (int64_t n = 0; n < count; n += STRIPE) {
            Vec totals[STRIPE_VECS] = {};
            for (int64_t head = 0; head < heads_; head += STRIPE_ROWS) {
                StripeTile products;
                products.zero();
                products.multiply_add(q + head * width_, width_, 1, k_.get() + n * width_, STRIPE, width_);
                const int64_t rows = std::min<int64_t>(STRIPE_ROWS, heads_ - head);
#pragma GCC unroll 8
                for (int i = 0; i < STRIPE_ROWS; ++i)
                    if (i < rows)  // a padding head must not meet an infinite key
#pragma GCC unroll 4
                        for (int j = 0; j < STRIPE_VECS; ++j) totals[j] += w[head + i] * max(Vec{}, products.sums[i][j]);
            }
            for (int j = 0; j < STRIPE_VECS; ++j) store(scores + n + j * LANES, totals[j]);
        }
    }

private:
    int64_t heads_, padded_heads_, width_;
    Buffer<float> q_, k_, rows_;
    const float* w_;
};

#if defined(LONGPREFILL_AMX)
// bf16 products on AMX. bf16 queries take one; fp32 queries are three bf16 numbers that add up to them, and take three:
// the cached numbers are bf16 themselves, so nothing is lost.
class AmxScorer {
public:
    static constexpr int64_t BLOCK = 256, GROUP = 2;

    AmxScorer(const Problem& p, int64_t first, int64_t last)
        : heads_(p.num_heads()), width_(padded(p.q.size(2), AMX_DEPTH)), group_(std::min(GROUP, last - first)),
          parts_(p.q.scalar_type() == at::kFloat ? 3 : 1), part_size_(padded(last - first, group_) * heads_ * width_),
          q_(Buffer<Bf16>::zeros(parts_ * part_size_)), rows_(Buffer<Bf16>::zeros(16 * width_)), k_(width_ * BLOCK),
          products_(group_ * heads_ * BLOCK), w_(p.w.const_data_ptr<float>() + first * heads_) {
        const int64_t size = p.q.size(2), begin = first * heads_, num_rows = (last - first) * heads_;
        for (int64_t row = 0; row < num_rows; ++row) {
            Bf16* to = q_.get() + row * width_;
            if (parts_ == 1)
                std::memcpy(static_cast<void*>(to), p.q.const_data_ptr<Bf16>() + (begin + row) * size, size * sizeof(Bf16));
            else
                split(p.q.const_data_ptr<float>() + (begin + row) * size, size, to);
        }
    }

    void pack(const Rows& keys, int64_t begin, int64_t count) {
        if (count < BLOCK) std::memset(static_cast<void*>(k_.get()), 0, width_ * BLOCK * sizeof(Bf16));
        has_infinite_ = false;
        for (int64_t n = 0; n < count; n += 16) {
            const int64_t present = std::min<int64_t>(16, count - n);
            for (int64_t i = 0; i < present; ++i) decode(keys, begin + n + i, rows_.get() + i * width_);
            if (present < 16)
                std::memset(static_cast<void*>(rows_.get() + present * width_), 0, (16 - present) * width_ * sizeof(Bf16));
            pack_sixteen_rows(rows_.get(), width_, width_, k_.get(), BLOCK, n);
        }
        if (parts_ > 1) look_for_infinite();
    }

    // Scores of `count` keys of the block for queries [t, t + size) of the task, BLOCK apart.
    void score(int64_t t, int64_t size, int64_t count, float* scores) const {
        const Bf16* q = q_.get() + t * heads_ * width_;
        const int64_t rows = group_ * heads_;
        amx_multiply(rows, BLOCK, width_, q, width_, k_.get(), BLOCK, products_.get(), BLOCK, false);
        for (int64_t part = 1; part < parts_; ++part)
            amx_multiply(rows, BLOCK, width_, q + part * part_size_, width_, has_infinite_ ? finite_k_.get() : k_.get(),
                         BLOCK, products_.get(), BLOCK, true);
        for (int64_t i = 0; i < size; ++i)
            weigh(products_.get() + i * heads_ * BLOCK, w_ + (t + i) * heads_, count, scores + i * BLOCK);
    }

    int64_t group() const { return group_; }

private:
    // sum over heads of w relu(products): four vectors of keys at a time.
    LP_INLINE void weigh(const float* products, const float* w, int64_t count, float* scores) const {
        for (int64_t n = 0; n < count; n += 4 * LANES) {
            Vec totals[4] = {};
            for (int64_t head = 0; head < heads_; ++head) {
                const Vec weight = splat(w[head]);
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j)
                    totals[j] += weight * max(Vec{}, load(products + head * BLOCK + n + j * LANES));
            }
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) store(scores + n + j * LANES, totals[j]);
        }
    }

    // x = first + second + third to the last bit; what is not finite has no second and third.
    void split(const float* x, int64_t size, Bf16* to) const {
        for_each_vector(size, [&](int64_t i, int count) {
            Vec rest = load_some(x + i, count);
            const Vec is_finite = (Vec)(absolute(rest) < std::numeric_limits<float>::infinity());
            for (int part = 0; part < 3; ++part) {
                Bf16 rounded[LANES];
                store(rounded, rest);
                std::memcpy(static_cast<void*>(to + part * part_size_ + i), rounded, count * sizeof(Bf16));
                rest = (Vec)((IntVec)(rest - load(rounded)) & (IntVec)is_finite);
            }
        });
    }

    LP_INLINE void decode(const Rows& keys, int64_t position, Bf16* to) const {
        const uint8_t* bytes = keys.row(position);
        if (keys.format == RowFormat::bf16) {
            if (keys.width == 128) std::memcpy(static_cast<void*>(to), bytes, 256);
            else std::memcpy(static_cast<void*>(to), bytes, keys.width * sizeof(Bf16));
            return;
        }
        decode_mxfp8_row(bytes, keys.width, to);
    }

    // An infinite key times the zero that a finite query may have as second part would be NaN.
    void look_for_infinite() {
        const int64_t size = width_ * BLOCK;
        const uint16_t* bits = reinterpret_cast<const uint16_t*>(k_.get());
        for (int64_t i = 0; i < size && !has_infinite_; ++i) has_infinite_ = (bits[i] & 0x7f80) == 0x7f80;
        if (!has_infinite_) return;
        if (!finite_k_) finite_k_ = Buffer<Bf16>(size);
        uint16_t* to = reinterpret_cast<uint16_t*>(finite_k_.get());
        for (int64_t i = 0; i < size; ++i) to[i] = (bits[i] & 0x7f80) == 0x7f80 ? 0 : bits[i];
    }

    int64_t heads_, width_, group_, parts_, part_size_;
    bool has_infinite_ = false;
    Buffer<Bf16> q_, rows_, k_, finite_k_;
    Buffer<float> products_;
    const float* w_;
    AmxProducts release_;
};
#endif

// Queries [first, last) of the problem, all of which see more than `places` keys; chosen: [T, places].
template <typename Scorer>
void select_block(const Problem& p, int64_t first, int64_t last, int32_t* chosen) {
    const int64_t capacity = Best::capacity(p.places, Scorer::BLOCK), row = capacity + LANES;
    const Buffer<float> scores((last - first) * row);
    const Buffer<int32_t> positions((last - first) * row);
    std::vector<Best> best;
    for (int64_t t = 0; t < last - first; ++t) best.push_back({scores.get() + t * row, positions.get() + t * row});
    Scorer scorer(p, first, last);
    int64_t group = Scorer::GROUP;
    if constexpr (Scorer::GROUP > 1) group = scorer.group();
    const Buffer<float> block_scores(group * Scorer::BLOCK);
    const int64_t seen_by_all = p.visible(last - 1);
    for (int64_t begin = 0; begin < seen_by_all; begin += Scorer::BLOCK) {
        const int64_t keys = std::min<int64_t>(Scorer::BLOCK, seen_by_all - begin);
        scorer.pack(p.keys, begin, keys);
        for (int64_t t = first; t < last; t += group) {
            const int64_t size = std::min(group, last - t);
            const int64_t widest = std::min(keys, p.visible(t + size - 1) - begin);
            if (widest <= 0) continue;
            scorer.score(t - first, size, widest, block_scores.get());
            for (int64_t i = 0; i < size; ++i) {
                const int64_t count = std::min(keys, p.visible(t + i) - begin);
                if (count > 0)
                    best[t - first + i].push(block_scores.get() + i * Scorer::BLOCK, count, begin, p.places, Scorer::BLOCK);
            }
        }
    }
    for (int64_t t = first; t < last; ++t) {
        Best& list = best[t - first];
        if (list.count > p.places) list.cut(p.places);
        std::memcpy(chosen + t * p.places, list.positions, p.places * sizeof(int32_t));
    }
}

// int32 [T, places]: the best keys of each query, ascending, then -1. q [T, I, X] fp32 or bf16, w fp32 [T, I].
at::Tensor indexer_select(const at::Tensor& q, const at::Tensor& w, const at::Tensor& pages, const at::Tensor& table,
                          int64_t num_rows, int64_t format, int64_t start, int64_t pool, int64_t places) {
    check_fp32(w, "w");
    check_dim(q, "q", 3), check_contiguous(q, "q"), check_whole(w, "w", {q.size(0), q.size(1)});
    const Rows keys(pages, table, num_rows, q.size(2), q.size(2), format);
    const Problem p{q, w, keys, start, pool, places};
    const int64_t num_queries = q.size(0);
    at::Tensor out = at::empty({num_queries, places}, q.options().dtype(at::kInt));
    int32_t* chosen = out.mutable_data_ptr<int32_t>();
    // Queries that see no more than they may keep take everything: no score decides anything for them.
    int64_t open = 0;
    for (; open < num_queries && p.visible(open) <= places; ++open)
        for (int64_t i = 0; i < places; ++i)
            chosen[open * places + i] = i < p.visible(open) ? static_cast<int32_t>(i) : -1;
    if (open < num_queries)
        TORCH_CHECK_VALUE(p.visible(num_queries - 1) <= num_rows, num_rows, " cached keys, but the last query sees ",
                          p.visible(num_queries - 1), ": write the keys first");
    const int64_t list_bytes = 8 * (Best::capacity(places, 512) + LANES);
    int64_t block = std::max<int64_t>(1, std::min(QUERY_BLOCK, LIST_BYTES / list_bytes));
    const int64_t share = (num_queries - open + at::get_num_threads() - 1) / at::get_num_threads();
    block = std::max<int64_t>(1, std::min(block, share));
    const int64_t num_blocks = (num_queries - open + block - 1) / block;
    at::parallel_for(0, num_blocks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
            const int64_t first = open + n * block, last = std::min(first + block, num_queries);
#if defined(LONGPREFILL_AMX)
            if (has_amx_products() && (keys.format == RowFormat::bf16 || keys.format == RowFormat::mxfp8)) {
                select_block<AmxScorer>(p, first, last, chosen);
                continue;
            }
#endif
            select_block<Fp32Scorer>(p, first, last, chosen);
        }
    });
    return out;
}

LONGPREFILL_OPS(indexer, m) {
    m.def("indexer_select(Tensor q, Tensor w, Tensor pages, Tensor table, int num_rows, int format, int start, "
          "int pool, int places) -> Tensor",
          TORCH_FN(indexer_select));
}

}  // namespace
}  // namespace longprefill
