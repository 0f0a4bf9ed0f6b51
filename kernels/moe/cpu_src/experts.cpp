// Experts of a mixture on AMX: tokens grouped by expert, a pass of products for gate and up with the activation behind
// it, one for down with the weighted sum behind it.
//
// D hidden, F inner, N tokens of a chunk, in blocks of 64. Everything runs transposed, [F, N] and [D, N]: the stored
// weights are the left operand as they lie, and what the activation writes is the right operand of the next product.
#include <algorithm>
#include <vector>

#include "longprefill/amx.h"
#include "longprefill/buffer.h"
#include "longprefill/torch.h"

namespace longprefill {
namespace {

#if defined(LONGPREFILL_AMX)

constexpr int64_t COLUMNS = 64;          // tokens of one product
constexpr int64_t ROWS = 128;            // weight rows of one product: 64 of gate and 64 of up, or 128 of down
constexpr int64_t DEPTH = 512;           // 32 rows of this depth and their partners stay in the level-1 cache
constexpr int64_t CHUNK_BYTES = 1 << 20; // packed tokens of a chunk: half of a level-2 cache

// Tokens side by side, as right operand: [blocks of 64 tokens][depth / 2][64 pairs].
struct Packed {
    int64_t depth;
    Buffer<Bf16> data;
    Packed(int64_t size, int64_t max_tokens) : depth(padded(size, AMX_DEPTH)), data(padded(max_tokens, COLUMNS) * depth) {}
    Bf16* block(int64_t n) const { return data.get() + n / COLUMNS * depth * COLUMNS; }
};

// Weight rows, copied close together, with zeros up to the padded depth: rows of a power
// of two would meet in the same few lines of a cache.
void copy_rows(const Bf16* from, int64_t num_rows, int64_t size, int64_t depth, Bf16* to) {
    for (int64_t begin = 0; begin < depth; begin += DEPTH) {
        const int64_t width = std::min(DEPTH, depth - begin), present = std::min(width, size - begin);
        Bf16* block = to + begin * ROWS;
        for (int64_t row = 0; row < num_rows; ++row) {
            std::memcpy(static_cast<void*>(block + row * width), from + row * size + begin, present * sizeof(Bf16));
            if (present < width)
                std::memset(static_cast<void*>(block + row * width + present), 0, (width - present) * sizeof(Bf16));
        }
    }
}

// c [rows, 64] = copied weights times one block of tokens.
void multiply(const Bf16* weights, int64_t rows, const Bf16* tokens, int64_t depth, float* c) {
    for (int64_t begin = 0; begin < depth; begin += DEPTH) {
        const int64_t width = std::min(DEPTH, depth - begin);
        amx_multiply(rows, COLUMNS, width, weights + begin * ROWS, width,
                     tokens + begin * COLUMNS, COLUMNS, c, COLUMNS, begin > 0);
    }
}

struct Layer {
    const at::Tensor &x, &gate_up, &down;
    double clamp;  // infinity: none
    int64_t hidden() const { return x.size(1); }
    int64_t inner() const { return down.size(2); }
};

class Chunk {
public:
    Chunk(const Layer& layer, int64_t max_tokens)
        : layer_(layer), x_(layer.hidden(), max_tokens), inner_(layer.inner(), max_tokens) {}

    // sum[token] += weight * expert(x[token]) for `count` tokens.
    void run(int64_t expert, const int64_t* tokens, const float* weights, int64_t count, float* sum) {
        const int64_t blocks = padded(count, COLUMNS);
        at::parallel_for(0, blocks / 16, 1, [&](int64_t begin, int64_t end) {
            const Buffer<Bf16> rows(16 * x_.depth);
            for (int64_t n = begin; n < end; ++n) gather(tokens, n * 16, count, rows.get());
        });
        const int64_t hidden = layer_.hidden(), inner = layer_.inner();
        const Bf16* gate = layer_.gate_up.const_data_ptr<Bf16>() + expert * 2 * inner * hidden;
        const Bf16* down = layer_.down.const_data_ptr<Bf16>() + expert * hidden * inner;
        at::parallel_for(0, (inner_.depth + ROWS / 2 - 1) / (ROWS / 2), 1, [&](int64_t begin, int64_t end) {
            const AmxProducts release;
            const Buffer<Bf16> copied(ROWS * x_.depth);
            const Buffer<float> products(ROWS * COLUMNS);
            for (int64_t n = begin; n < end; ++n) activate(gate, n * (ROWS / 2), blocks, copied.get(), products.get());
        });
        at::parallel_for(0, (hidden + ROWS - 1) / ROWS, 1, [&](int64_t begin, int64_t end) {
            const AmxProducts release;
            const Buffer<Bf16> copied(ROWS * inner_.depth);
            const Buffer<float> products(ROWS * COLUMNS);
            for (int64_t n = begin; n < end; ++n)
                add_down(down, n * ROWS, tokens, weights, count, copied.get(), products.get(), sum);
        });
    }

private:
    void gather(const int64_t* tokens, int64_t first, int64_t count, Bf16* rows) const {
        const int64_t hidden = layer_.hidden(), depth = x_.depth;
        for (int64_t i = 0; i < 16; ++i) {
            Bf16* to = rows + i * depth;
            const int64_t size = first + i < count ? hidden : 0;
            if (size)
                std::memcpy(static_cast<void*>(to), layer_.x.const_data_ptr<Bf16>() + tokens[first + i] * hidden,
                            size * sizeof(Bf16));
            std::memset(static_cast<void*>(to + size), 0, (depth - size) * sizeof(Bf16));
        }
        pack_sixteen_rows(rows, depth, depth, x_.block(first), COLUMNS, first % COLUMNS);
    }

    // Inner rows [first, first + 64): silu(gate) * up, as pairs of rows; zeros behind the last.
    void activate(const Bf16* gate, int64_t first, int64_t columns, Bf16* copied, float* products) const {
        const int64_t hidden = layer_.hidden(), inner = layer_.inner(), depth = x_.depth;
        const int64_t rows = std::min(ROWS / 2, std::max<int64_t>(0, inner - first));
        const int64_t padded_rows = std::min(ROWS / 2, inner_.depth - first);
        copy_rows(gate + first * hidden, rows, hidden, depth, copied);
        const Buffer<Bf16> copied_up(ROWS * depth);
        copy_rows(gate + (inner + first) * hidden, rows, hidden, depth, copied_up.get());
        float* ups = products + ROWS / 2 * COLUMNS;
        for (int64_t n = 0; n < columns; n += COLUMNS) {
            if (rows) {
                multiply(copied, rows, x_.block(n), depth, products);
                multiply(copied_up.get(), rows, x_.block(n), depth, ups);
            }
            Bf16* to = inner_.block(n) + first * COLUMNS;
            for (int64_t row = 0; row < padded_rows; row += 2)
                for (int64_t c = 0; c < COLUMNS; c += 16) {
                    const __m512 even = row < rows ? activated(products, ups, row * COLUMNS + c) : _mm512_setzero_ps();
                    const __m512 odd =
                        row + 1 < rows ? activated(products, ups, (row + 1) * COLUMNS + c) : _mm512_setzero_ps();
                    _mm512_storeu_si512(to + row * COLUMNS + 2 * c, to_bf16_pairs(even, odd));
                }
        }
    }

    LP_INLINE __m512 activated(const float* gates, const float* ups, int64_t at) const {
        const float limit = static_cast<float>(layer_.clamp);
        Vec gate = load(gates + at), up = load(ups + at);
        gate = gate > limit ? splat(limit) : gate;
        up = up > limit ? splat(limit) : (up < -limit ? splat(-limit) : up);
        return (__m512)(gate * sigmoid(gate) * up);
    }

    // Hidden rows [first, first + 128) of every token's sum.
    void add_down(const Bf16* down, int64_t first, const int64_t* tokens, const float* weights, int64_t count,
                  Bf16* copied, float* products, float* sum) const {
        const int64_t hidden = layer_.hidden(), rows = std::min(ROWS, hidden - first);
        copy_rows(down + first * layer_.inner(), rows, layer_.inner(), inner_.depth, copied);
        for (int64_t n = 0; n < count; n += COLUMNS) {
            multiply(copied, rows, inner_.block(n), inner_.depth, products);
            for (int64_t c = 0; c < COLUMNS && n + c < count; c += 16)
                for (int64_t row = 0; row < rows; row += 16) {
                    __m512i x[16];
#pragma GCC unroll 16
                    for (int i = 0; i < 16; ++i)  // rows behind the last are older products, not stored below
                        x[i] = _mm512_loadu_si512(products + (row + i) * COLUMNS + c);
                    transpose_words(x);
                    const __mmask16 inside = rows - row < 16 ? (1u << (rows - row)) - 1 : 0xffffu;
                    for (int64_t i = 0; i < std::min<int64_t>(16, count - n - c); ++i) {
                        float* to = sum + tokens[n + c + i] * hidden + first + row;
                        const __m512 weight = _mm512_set1_ps(weights[n + c + i]);
                        _mm512_mask_storeu_ps(
                            to, inside, _mm512_fmadd_ps((__m512)x[i], weight, _mm512_maskz_loadu_ps(inside, to)));
                    }
                }
        }
    }

    const Layer& layer_;
    Packed x_, inner_;
};

// fp32 [T, D]: sum over a token's experts, in ascending order, of weight * down(silu(gate) * up). All bf16 but weights.
at::Tensor moe_experts(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weights,
                       const at::Tensor& gate_up, const at::Tensor& down, double clamp) {
    check_dim(x, "x", 2), check_contiguous(x, "x"), check_dim(experts, "experts", 2), check_dim(down, "down", 3);
    check_fp32(weights, "weights");
    const int64_t num_experts = gate_up.size(0), slots = experts.size(1), num_slots = experts.numel();
    check_whole(experts, "experts", {x.size(0), slots}), check_whole(weights, "weights", experts.sizes());
    check_whole(down, "down", {num_experts, x.size(1), down.size(2)});
    check_whole(gate_up, "gate_up", {num_experts, 2 * down.size(2), x.size(1)});
    const int64_t* chosen = experts.const_data_ptr<int64_t>();
    const float* weight = weights.const_data_ptr<float>();
    std::vector<int64_t> begins(num_experts + 1, 0);
    for (int64_t i = 0; i < num_slots; ++i)
        if (chosen[i] >= 0) {
            TORCH_CHECK_VALUE(chosen[i] < num_experts, "expert ", chosen[i], ": must be below ", num_experts);
            ++begins[chosen[i] + 1];
        }
    for (int64_t e = 0; e < num_experts; ++e) begins[e + 1] += begins[e];
    std::vector<int64_t> tokens(begins[num_experts]), next(begins.begin(), begins.end() - 1);
    std::vector<float> sorted(begins[num_experts]);
    for (int64_t i = 0; i < num_slots; ++i)
        if (chosen[i] >= 0) {
            const int64_t place = next[chosen[i]]++;
            tokens[place] = i / slots, sorted[place] = weight[i];
        }
    at::Tensor sum = at::empty({x.size(0), x.size(1)}, x.options().dtype(at::kFloat));
    float* sum_data = sum.mutable_data_ptr<float>();
    std::fill_n(sum_data, sum.numel(), 0.0f);
    int64_t most = 0;
    for (int64_t e = 0; e < num_experts; ++e) most = std::max(most, begins[e + 1] - begins[e]);
    const int64_t widest = padded(std::max(x.size(1), down.size(2)), AMX_DEPTH) * int64_t{sizeof(Bf16)};
    const int64_t limit = std::max(COLUMNS, CHUNK_BYTES / widest / COLUMNS * COLUMNS);
    const Layer layer{x, gate_up, down, clamp};
    Chunk chunk(layer, std::min(limit, most));
    for (int64_t e = 0; e < num_experts; ++e)
        for (int64_t first = begins[e]; first < begins[e + 1]; first += limit)
            chunk.run(e, tokens.data() + first, sorted.data() + first, std::min(limit, begins[e + 1] - first), sum_data);
    return sum;
}

bool moe_is_compiled() { return has_amx_products(); }

#else

at::Tensor moe_experts(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                       double) {
    TORCH_CHECK(false, "experts are compiled for AMX only");
}

bool moe_is_compiled() { return false; }

#endif

LONGPREFILL_OPS(moe, m) {
    m.def("moe_is_compiled() -> bool", TORCH_FN(moe_is_compiled));
    m.def("moe_experts(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor down, float clamp) -> Tensor",
          TORCH_FN(moe_experts));
}

}  // namespace
}  // namespace longprefill
