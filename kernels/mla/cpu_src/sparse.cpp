// Sparse latent attention: one query's heads over the rows it selected, in blocks of rows, with a running softmax.
//
// H heads, L = R + P row width, R latent rank, K rows of a block. Logits are made as [K, H], heads side by side: maxima
// and sums over the rows are then vertical, and gathered rows are the left operand just as they lie.
#include <algorithm>
#include <vector>

#include "longprefill/amx.h"
#include "longprefill/buffer.h"
#include "longprefill/rows.h"
#include "longprefill/stripes.h"
#include "softmax.h"

namespace longprefill {
namespace {

// fp32 products. Logits [K, H] have their heads side by side in VECS vectors, weights [K, H] are the transposed left
// operand of the second product.
template <int VECS>
class Fp32Attention {
public:
    static constexpr int64_t BLOCK = 64, AHEAD = 6;           // rows; how many are fetched before they are decoded
    static constexpr int64_t HEADS = VECS * LANES;             // of one product
    static constexpr int64_t ROWS = LANES == 16 ? 8 : (VECS == 1 ? 8 : (VECS == 2 ? 6 : 4));

    Fp32Attention(const Rows& rows, int64_t heads, int64_t rank)
        : rows_(rows), heads_(heads), rank_(rank), padded_heads_(padded(heads, HEADS)),
          padded_rank_(padded(rank, STRIPE)), row_(padded(std::max(rows.width, padded_rank_), LANES)),
          q_(Buffer<float>::zeros(rows.width * padded_heads_)), block_(Buffer<float>::zeros((BLOCK + ROWS) * row_)),
          weights_(Buffer<float>::zeros((BLOCK + ROWS) * padded_heads_)),
          out_(Buffer<float>::zeros(padded(padded_heads_, STRIPE_ROWS) * padded_rank_)),
          max_(Buffer<float>::zeros(padded_heads_)), sum_(Buffer<float>::zeros(padded_heads_)) {}

    template <typename T>
    void start(const T* q) {
        for (int64_t h = 0; h < heads_; ++h) {
            float* to = q_.get() + h / HEADS * HEADS * rows_.width + h % HEADS;
            for (int64_t c = 0; c < rows_.width; ++c) to[c * HEADS] = static_cast<float>(q[h * rows_.width + c]);
        }
        std::fill_n(out_.get(), padded_heads_ * padded_rank_, 0.0f);
        std::fill_n(sum_.get(), padded_heads_, 0.0f);
        std::fill_n(max_.get(), padded_heads_, NONE);
    }

    // Adds rows [begin, begin + BLOCK) of the `total` selected ones, or what is left of them.
    void add(const int32_t* positions, int64_t begin, int64_t total, float scale) {
        const int64_t count = std::min(BLOCK, total - begin);
        for (int64_t i = 0; i < count; ++i) {
            if (begin + i + AHEAD < total) fetch(positions[begin + i + AHEAD]);
            rows_.decode(positions[begin + i], block_.get() + i * row_);
        }
        // Rows of the last tile behind `count` hold older rows: their logits are made and not read.
        for (int64_t h = 0; h < padded_heads_; h += HEADS)
            for (int64_t i = 0; i < count; i += ROWS) {
                StripeSums<ROWS, VECS> sums;
                sums.zero();
                sums.multiply_add(block_.get() + i * row_, row_, 1, q_.get() + h * rows_.width, HEADS, rows_.width);
                sums.store_to(weights_.get() + i * padded_heads_ + h, padded_heads_);
            }
        for (int64_t h = 0; h < padded_heads_; h += LANES) soften(h, count, scale);
        for (int64_t c = 0; c < padded_rank_; c += STRIPE)
            for (int64_t h = 0; h < heads_; h += STRIPE_ROWS) {
                StripeTile sums;
                float* to = out_.get() + h * padded_rank_ + c;
                sums.load_from(to, padded_rank_);
                sums.multiply_add(weights_.get() + h, 1, padded_heads_, block_.get() + c, row_, count);
                sums.store_to(to, padded_rank_);
            }
    }

    template <typename T>
    void finish(T* out) const {
        for (int64_t h = 0; h < heads_; ++h) {
            const Vec share = splat(1.0f / sum_[h]);
            for_each_vector(rank_, [&](int64_t c, int size) {
                store_some(out + h * rank_ + c, load(out_.get() + h * padded_rank_ + c) * share, size);
            });
        }
    }

private:
    // Random rows come from memory.
    LP_INLINE void fetch(int32_t position) const {
        const uint8_t* row = rows_.row(position);
        for (int64_t byte = 0; byte < rows_.row_bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
    }

    // Logits of LANES heads become weights; what was summed before is scaled to the new maximum.
    void soften(int64_t h, int64_t count, float scale) {
        const Vec factor = splat(scale), before = load(max_.get() + h);
        Vec highest = before;
        for (int64_t i = 0; i < count; ++i) highest = max(load(weights_.get() + i * padded_heads_ + h) * factor, highest);
        const Vec decay = before == highest ? splat(1.0f) : exp(before - highest), base = base_of(highest);
        Vec total = load(sum_.get() + h) * decay;
        for (int64_t i = 0; i < count; ++i) {
            float* at = weights_.get() + i * padded_heads_ + h;
            const Vec weight = exp(load(at) * factor - base);
            total += weight;
            store(at, weight);
        }
        store(max_.get() + h, highest);
        store(sum_.get() + h, total);
        for (int lane = 0; lane < LANES; ++lane) {
            if (decay[lane] == 1.0f) continue;
            float* row = out_.get() + (h + lane) * padded_rank_;
            for (int64_t c = 0; c < padded_rank_; c += LANES) store(row + c, load(row + c) * splat(decay[lane]));
        }
    }

    const Rows& rows_;
    int64_t heads_, rank_, padded_heads_, padded_rank_, row_;
    Buffer<float> q_, block_, weights_, out_, max_, sum_;
};

#if defined(LONGPREFILL_AMX)
// bf16 products on AMX.
class AmxAttention {
public:
    static constexpr int64_t BLOCK = 128;
    static constexpr int64_t AHEAD = 8;     // rows that are fetched before they are copied, at least
    static constexpr int64_t STRIP = 32, VALUE_STRIP = 128;  // the products are cut so that fetches fit in between
    static constexpr int64_t SLOT = 40;                      // cache lines that may be on their way at a time

    AmxAttention(const Rows& rows, int64_t heads, int64_t rank)
        : rows_(rows), heads_(heads), rank_(rank), padded_heads_(padded(heads, 16)),
          row_(padded(rows.width, AMX_DEPTH)), padded_rank_(padded(rank, 32)),
          q_(Buffer<Bf16>::zeros(row_ * padded_heads_)), q_rows_(Buffer<Bf16>::zeros(padded_heads_ * row_)),
          strip_(Buffer<Bf16>::zeros(STRIP * row_ + 64)), values_(Buffer<Bf16>::zeros(BLOCK * padded_rank_)),
          weights_(Buffer<Bf16>::zeros(padded_heads_ * BLOCK)), logits_(Buffer<float>::zeros(BLOCK * padded_heads_)),
          out_(Buffer<float>::zeros(padded_heads_ * padded_rank_)), max_(Buffer<float>::zeros(padded_heads_)),
          sum_(Buffer<float>::zeros(padded_heads_)) {}

    void start(const Bf16* q) {
        for (int64_t h = 0; h < heads_; ++h)
            std::memcpy(static_cast<void*>(q_rows_.get() + h * row_), q + h * rows_.width, rows_.width * sizeof(Bf16));
        for (int64_t h = 0; h < padded_heads_; h += 16)
            pack_sixteen_rows(q_rows_.get() + h * row_, row_, row_, q_.get(), padded_heads_, h);
        std::fill_n(sum_.get(), padded_heads_, 0.0f);
        std::fill_n(max_.get(), padded_heads_, NONE);
        has_output_ = false;
    }

    // Adds rows [begin, begin + BLOCK) of the `total` selected ones, or what is left of them.
    void add(const int32_t* positions, int64_t begin, int64_t total, float scale) {
        const int64_t count = std::min(BLOCK, total - begin);
        if (begin == 0) next_ = {0, 0};
        for (int64_t i = 0; i < count; i += STRIP) {
            gather(positions, begin + i, total, i);
            fetch_some(positions, total, SLOT);
            // Whole strips always: another shape is another kernel of oneDNN's. Logits behind `count` are not read.
            amx_multiply(STRIP, padded_heads_, row_, strip_.get(), row_, q_.get(), padded_heads_,
                         logits_.get() + i * padded_heads_, padded_heads_, false);
        }
        const int64_t written = padded(count, 2);
        std::memset(static_cast<void*>(values_.get() + written * padded_rank_), 0,
                    (BLOCK - written) * padded_rank_ * sizeof(Bf16));
        for (int64_t h = 0; h < padded_heads_; h += 16) {
            fetch_some(positions, total, SLOT);
            soften(h, count, scale * LOG2_E);
        }
        for (int64_t c = 0; c < padded_rank_; c += VALUE_STRIP) {
            fetch_some(positions, total, SLOT);
            amx_multiply(padded_heads_, std::min(VALUE_STRIP, padded_rank_ - c), BLOCK, weights_.get(), BLOCK,
                         values_.get() + 2 * c, padded_rank_, out_.get() + c, padded_rank_, has_output_);
        }
        has_output_ = true;
    }

    void finish(Bf16* out) const {
        // Values were packed by 16-bit unpacking inside 128-bit lanes: of 32 columns the first vector of sums holds
        // 0-3, 8-11, 16-19, 24-27, the second the others.
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        for (int64_t h = 0; h < heads_; ++h) {
            const __m512 share = _mm512_set1_ps(1.0f / sum_[h]);
            for (int64_t c = 0; c < rank_; c += 32) {
                const float* from = out_.get() + h * padded_rank_ + c;
                const __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + 16);
                const __m512i both = to_bf16(_mm512_mul_ps(_mm512_permutex2var_ps(a, first, b), share),
                                             _mm512_mul_ps(_mm512_permutex2var_ps(a, second, b), share));
                const int64_t size = std::min<int64_t>(32, rank_ - c);
                const __mmask32 inside = size == 32 ? 0xffffffffu : (1u << size) - 1;
                _mm512_mask_storeu_epi16(out + h * rank_ + c, inside, both);
            }
        }
    }

private:
    // Rows [begin, begin + STRIP) of the selected ones: as they are into the strip, which stays in the level-1 cache, and
    // in pairs into the block's values, from `at` on.
    void gather(const int32_t* positions, int64_t begin, int64_t total, int64_t at) {
        const int64_t count = std::min(STRIP, total - begin);
        for (int64_t i = 0; i < count; i += 2) {
            while (next_.row < std::min(begin + i + AHEAD, total)) fetch_some(positions, total, 1);
            Bf16 *a = strip_.get() + i * row_, *b = a + row_;
            read(positions[begin + i], a);
            if (i + 1 < count) read(positions[begin + i + 1], b);
            else std::memset(static_cast<void*>(b), 0, row_ * sizeof(Bf16));
            Bf16* to = values_.get() + (at + i) * padded_rank_;
            for (int64_t c = 0; c < rank_; c += 32) {
                const __m512i x = _mm512_loadu_si512(a + c), y = _mm512_loadu_si512(b + c);
                _mm512_storeu_si512(to + 2 * c, _mm512_unpacklo_epi16(x, y));
                _mm512_storeu_si512(to + 2 * c + 32, _mm512_unpackhi_epi16(x, y));
            }
        }
    }

    // Asks for the next lines of selected rows. Random rows come from memory: behind products they cost nothing.
    LP_INLINE void fetch_some(const int32_t* positions, int64_t total, int64_t lines) {
        for (; lines > 0 && next_.row < total; --lines) {
            __builtin_prefetch(rows_.row(positions[next_.row]) + next_.offset, 0, 2);
            next_.offset += 64;
            if (next_.offset >= rows_.row_bytes) next_.offset = 0, ++next_.row;
        }
    }

    LP_INLINE void read(int32_t position, Bf16* to) const {
        if (rows_.format == RowFormat::bf16)
            std::memcpy(static_cast<void*>(to), rows_.row(position), rows_.width * sizeof(Bf16));
        else
            rows_.decode(position, to);
    }

    // Logits of 16 heads become weights, transposed to rows of heads.
    void soften(int64_t h, int64_t count, float scale) {
        const __m512 factor = _mm512_set1_ps(scale);
        const float* logits = logits_.get() + h;
        __m512 highest = _mm512_set1_ps(NONE);
        for (int64_t i = 0; i < count; ++i)
            highest = _mm512_max_ps(_mm512_loadu_ps(logits + i * padded_heads_), highest);
        highest = _mm512_mul_ps(highest, factor);
        const __m512 before = _mm512_loadu_ps(max_.get() + h);
        const __mmask16 moves = _mm512_cmp_ps_mask(highest, _mm512_add_ps(before, _mm512_set1_ps(MARGIN)), _CMP_GT_OQ);
        __m512 max = before, total = _mm512_loadu_ps(sum_.get() + h);
        if (moves) {
            max = _mm512_mask_mov_ps(before, moves, highest);
            const __m512 decay = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), moves,
                                                    power_of_two(_mm512_sub_ps(before, highest)));
            total = _mm512_mul_ps(total, decay);
            _mm512_storeu_ps(max_.get() + h, max);
            if (has_output_) scale_output(h, moves, decay);
        }
        const __m512 shift = _mm512_sub_ps(_mm512_setzero_ps(), (__m512)base_of((Vec)max));
        for (int64_t block = 0; block < BLOCK; block += 32) {
            __m512i pairs[16];
            for (int pair = 0; pair < 16; ++pair) {
                const int64_t i = block + 2 * pair;
                const __m512 a = weight(logits, i, count, factor, shift), b = weight(logits, i + 1, count, factor, shift);
                total = _mm512_add_ps(total, _mm512_add_ps(a, b));
                pairs[pair] = to_bf16_pairs(a, b);
            }
            transpose_words(pairs);
            for (int head = 0; head < 16; ++head)
                _mm512_storeu_si512(weights_.get() + (h + head) * BLOCK + block, pairs[head]);
        }
        _mm512_storeu_ps(sum_.get() + h, total);
    }

    LP_INLINE __m512 weight(const float* logits, int64_t i, int64_t count, __m512 factor, __m512 shift) const {
        if (i >= count) return _mm512_setzero_ps();
        return power_of_two(_mm512_fmadd_ps(_mm512_loadu_ps(logits + i * padded_heads_), factor, shift));
    }

    void scale_output(int64_t h, __mmask16 moves, __m512 decay) {
        float factors[16];
        _mm512_storeu_ps(factors, decay);
        for (int head = 0; head < 16; ++head) {
            if (!(moves >> head & 1)) continue;
            float* row = out_.get() + (h + head) * padded_rank_;
            for (int64_t c = 0; c < padded_rank_; c += LANES) store(row + c, load(row + c) * splat(factors[head]));
        }
    }

    const Rows& rows_;
    int64_t heads_, rank_, padded_heads_, row_, padded_rank_;
    bool has_output_ = false;
    struct {
        int64_t row, offset;
    } next_{};  // what is to be fetched next
    Buffer<Bf16> q_, q_rows_, strip_, values_, weights_;
    Buffer<float> logits_, out_, max_, sum_;
    AmxProducts release_;
};
#endif

// out[t] of queries [first, last).
template <typename Attention, typename T>
void attend(const at::Tensor& q, const Rows& rows, const at::Tensor& indices, double scale, at::Tensor& out,
            int64_t first, int64_t last) {
    const int64_t heads = q.size(1), width = q.size(2), rank = out.size(2), places = indices.size(1);
    const T* q_data = q.const_data_ptr<T>();
    const int32_t* chosen = indices.const_data_ptr<int32_t>();
    T* out_data = out.mutable_data_ptr<T>();
    Attention attention(rows, heads, rank);
    std::vector<int32_t> positions(places);
    for (int64_t t = first; t < last; ++t) {
        int64_t count = 0;
        for (int64_t i = 0; i < places; ++i) {
            const int32_t position = chosen[t * places + i];
            TORCH_CHECK_VALUE(position < rows.num_rows, "index ", position, " of ", rows.num_rows,
                              " cached rows: select only cached positions");
            positions[count] = position;
            count += position >= 0;
        }
        if (count == 0) {
            std::fill_n(out_data + t * heads * rank, heads * rank, T(0.0f));
            continue;
        }
        attention.start(q_data + t * heads * width);
        for (int64_t begin = 0; begin < count; begin += Attention::BLOCK)
            attention.add(positions.data(), begin, count, static_cast<float>(scale));
        attention.finish(out_data + t * heads * rank);
    }
}

// [T, H, R] in q's dtype. q [T, H, R + P] fp32 or bf16, indices int32 [T, S]; `format_rank` is the FP8 format's own.
at::Tensor mla_sparse(const at::Tensor& q, const at::Tensor& pages, const at::Tensor& table, int64_t num_rows,
                      int64_t format, int64_t format_rank, const at::Tensor& indices, double scale, int64_t rank) {
    check_dim(q, "q", 3), check_contiguous(q, "q"), check_dim(indices, "indices", 2);
    check_whole(indices, "indices", {q.size(0), indices.size(1)});
    const Rows rows(pages, table, num_rows, q.size(2), format_rank, format);
    at::Tensor out = at::empty({q.size(0), q.size(1), rank}, q.options());
    at::parallel_for(0, q.size(0), 1, [&](int64_t first, int64_t last) {
#if defined(LONGPREFILL_AMX)
        if (q.scalar_type() == at::kBFloat16 && has_amx_products())
            return attend<AmxAttention, c10::BFloat16>(q, rows, indices, scale, out, first, last);
#endif
        for_float_type(q, "q", [&](auto* type) {
            using T = std::remove_pointer_t<decltype(type)>;
            // As many heads side by side as leave the fewest places empty.
            const int64_t heads = q.size(1), one = padded(heads, LANES), two = padded(heads, 2 * LANES), three = padded(heads, 3 * LANES);
            if (three <= std::min(one, two)) attend<Fp32Attention<3>, T>(q, rows, indices, scale, out, first, last);
            else if (two <= one) attend<Fp32Attention<2>, T>(q, rows, indices, scale, out, first, last);
            else attend<Fp32Attention<1>, T>(q, rows, indices, scale, out, first, last);
        });
    });
    return out;
}

LONGPREFILL_OPS(mla, m) {
    m.def("mla_sparse(Tensor q, Tensor pages, Tensor table, int num_rows, int format, int format_rank, Tensor indices, "
          "float scale, int rank) -> Tensor",
          TORCH_FN(mla_sparse));
}

}  // namespace
}  // namespace longprefill
