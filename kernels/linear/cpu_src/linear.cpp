// Products with weights, and the gated activation of a feed-forward in one pass.
//
// Where a processor has no bf16 products of its own, torch's run at a tenth of its fp32 products. Here both operands are
// widened as they are packed, every sum is fp32 and rounded once. bf16 products that stay fp32 run on AMX.
#include <algorithm>

#include "longprefill/amx.h"
#include "longprefill/buffer.h"
#include "longprefill/stripes.h"
#include "longprefill/torch.h"

namespace longprefill {
namespace {

// [T, F] of [T, 2 F], gate first: silu(min(gate, limit)) * clamp(up, -limit, limit), one rounding at the end.
at::Tensor gated_silu(const at::Tensor& gate_up, double clamp) {
    check_dim(gate_up, "gate_up", 2), check_rows_contiguous(gate_up, "gate_up");
    TORCH_CHECK_VALUE(gate_up.size(1) % 2 == 0, "gate_up has shape ", gate_up.sizes(),
                      ": gate and up are its two halves, so its width must be even");
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

// Rows x [T, D] times one matrix of weights, [E, D], or [D, E] if it is transposed.
template <typename T>
class Product {
public:
    static constexpr int64_t ROWS = 96, DEPTH = 160;         // of x, packed: with one stripe's part they fit level 1
    static constexpr int64_t COLUMNS = 504 / STRIPE * STRIPE;  // of the result at a time: sums of ROWS of them, level 2
    static constexpr int64_t FEWEST_ROWS = 12;               // below, packing the weights costs more than it saves

    Product(const T* weight, int64_t row, bool is_transposed, int64_t depth, int64_t num_out)
        : weight_(weight), row_(row), depth_(depth), num_out_(num_out), is_transposed_(is_transposed) {}

    template <typename Out>
    void run(const T* x, int64_t x_row, int64_t num_rows, Out* out, int64_t out_row) const {
        if (num_rows < FEWEST_ROWS) return run_few(x, x_row, num_rows, out, out_row);
        const Buffer<float> packed(num_stripes(std::min(COLUMNS, num_out_)) * STRIPE * depth_);
        for (int64_t first = 0; first < num_out_; first += COLUMNS) {
            const int64_t count = std::min(COLUMNS, num_out_ - first);
            at::parallel_for(0, num_stripes(count), 1, [&](int64_t begin, int64_t end) {
                for (int64_t n = begin; n < end; ++n) pack(first + n * STRIPE, packed.get() + n * STRIPE * depth_);
            });
            at::parallel_for(0, (num_rows + ROWS - 1) / ROWS, 1, [&](int64_t begin, int64_t end) {
                const Buffer<float> rows(ROWS * DEPTH), sums(ROWS * num_stripes(count) * STRIPE);
                for (int64_t block = begin; block < end; ++block) {
                    const int64_t from = block * ROWS, size = std::min(ROWS, num_rows - from);
                    multiply(x + from * x_row, x_row, size, packed.get(), count, rows.get(), sums.get());
                    for (int64_t t = 0; t < size; ++t)
                        for_each_vector(count, [&](int64_t n, int width) {
                            store_some(out + (from + t) * out_row + first + n,
                                       load(sums.get() + t * num_stripes(count) * STRIPE + n), width);
                        });
                }
            });
        }
    }

private:
    void pack(int64_t first, float* stripe) const {
        const int64_t count = std::min<int64_t>(STRIPE, num_out_ - first);
        if (is_transposed_) pack_columns(weight_ + first, row_, count, depth_, stripe);
        else pack_rows(weight_ + first * row_, row_, count, depth_, stripe);
    }

    // sums [size, columns] of `size` rows.
    void multiply(const T* x, int64_t x_row, int64_t size, const float* packed, int64_t count, float* rows,
                  float* sums) const {
        const int64_t columns = num_stripes(count) * STRIPE, tiles = padded(size, STRIPE_ROWS);
        for (int64_t begin = 0; begin < depth_ || begin == 0; begin += DEPTH) {
            const int64_t width = std::min(DEPTH, depth_ - begin);
            for (int64_t t = 0; t < tiles; ++t)
                for_each_vector(width, [&](int64_t k, int lanes) {
                    store(rows + t * DEPTH + k, t < size ? load_some(x + t * x_row + begin + k, lanes) : Vec{});
                });
            for (int64_t n = 0; n < columns; n += STRIPE)
                for (int64_t t = 0; t < tiles; t += STRIPE_ROWS) {
                    StripeTile tile;
                    float* to = sums + t * columns + n;
                    if (begin == 0) tile.zero();
                    else tile.load_from(to, columns);
                    tile.multiply_add(rows + t * DEPTH, DEPTH, 1, packed + n * depth_ + begin * STRIPE, STRIPE, width);
                    tile.store_to(to, columns);
                }
        }
    }

    // A few rows: every weight is read once as it lies.
    template <typename Out>
    void run_few(const T* x, int64_t x_row, int64_t num_rows, Out* out, int64_t out_row) const {
        const int64_t stride = padded(depth_, LANES);
        const Buffer<float> wide = Buffer<float>::zeros(padded(num_rows, 4) * stride);
        for (int64_t t = 0; t < num_rows; ++t)
            for_each_vector(depth_, [&](int64_t k, int lanes) {
                store(wide.get() + t * stride + k, load_some(x + t * x_row + k, lanes));
            });
        const int64_t grain = std::max<int64_t>(1, GRAIN_ELEMENTS / std::max<int64_t>(1, depth_ * num_rows));
        if (is_transposed_) {
            at::parallel_for(0, num_rows, 1, [&](int64_t begin, int64_t end) {
                const Buffer<float> sums(num_out_);
                for (int64_t t = begin; t < end; ++t) add_rows(wide.get() + t * stride, sums.get(), out + t * out_row);
            });
            return;
        }
        at::parallel_for(0, num_out_, grain, [&](int64_t begin, int64_t end) {
            for (int64_t n = begin; n < end; ++n)
                for (int64_t t = 0; t < num_rows; t += 4) {
                    Vec sums[4] = {};
                    for_each_vector(depth_, [&](int64_t k, int lanes) {
                        const Vec weight = load_some(weight_ + n * row_ + k, lanes);
#pragma GCC unroll 4
                        for (int i = 0; i < 4; ++i) sums[i] += load(wide.get() + (t + i) * stride + k) * weight;
                    });
                    for (int64_t i = 0; i < std::min<int64_t>(4, num_rows - t); ++i)
                        store_some(out + (t + i) * out_row + n, splat(sum(sums[i])), 1);
                }
        });
    }

    // out = the rows of weights by the numbers of x.
    template <typename Out>
    void add_rows(const float* x, float* sums, Out* out) const {
        std::fill_n(sums, num_out_, 0.0f);
        int64_t k = 0;
        for (; k + 4 <= depth_; k += 4) add_some<4>(x + k, weight_ + k * row_, sums);
        for (; k < depth_; ++k) add_some<1>(x + k, weight_ + k * row_, sums);
        for_each_vector(num_out_, [&](int64_t n, int lanes) { store_some(out + n, load_some(sums + n, lanes), lanes); });
    }
    template <int COUNT>
    LP_INLINE void add_some(const float* x, const T* rows, float* sums) const {
        for_each_vector(num_out_, [&](int64_t n, int lanes) {
            Vec total = load_some(sums + n, lanes);
#pragma GCC unroll 4
            for (int i = 0; i < COUNT; ++i) total += splat(x[i]) * load_some(rows + i * row_ + n, lanes);
            store_some(sums + n, total, lanes);
        });
    }

    const T* weight_;
    int64_t row_, depth_, num_out_;
    bool is_transposed_;
};

// out [T, H, E] = x [T, H, D] times each head's weight, [H, E, D], or [H, D, E] if `is_transposed`. Sums are fp32 and
// rounded to out's dtype once.
void linear_products(const at::Tensor& x, const at::Tensor& weight, bool is_transposed, const at::Tensor& out) {
    check_dim(x, "x [T, H, D]", 3), check_dim(weight, "weight [H, E, D]", 3);
    const int64_t num_rows = x.size(0), heads = x.size(1), depth = x.size(2), num_out = weight.size(is_transposed ? 2 : 1);
    if (is_transposed) check_shape(weight, "weight [H, D, E] of x [T, H, D]", {heads, depth, num_out});
    else check_shape(weight, "weight [H, E, D] of x [T, H, D]", {heads, num_out, depth});
    check_shape(out, "out", {num_rows, heads, num_out});
    TORCH_CHECK_VALUE(x.scalar_type() == weight.scalar_type(), "x has dtype ", x.scalar_type(), ", weight ",
                      weight.scalar_type(), ": cast them to one");
    const auto check_row = [](const at::Tensor& matrix, const char* name) {
        TORCH_CHECK_VALUE(matrix.stride(2) == 1 || matrix.size(2) < 2, name, " of shape ", matrix.sizes(),
                          " has strides ", matrix.strides(), ": the last must be 1");
    };
    check_row(x, "x"), check_row(weight, "weight"), check_row(out, "out");
    for_float_type(x, "x", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for_float_type(out, "out", [&](auto* out_type) {
            using Out = std::remove_pointer_t<decltype(out_type)>;
            for (int64_t h = 0; h < heads; ++h)
                Product<T>(weight.const_data_ptr<T>() + h * weight.stride(0), weight.stride(1), is_transposed, depth,
                           num_out)
                    .run(x.const_data_ptr<T>() + h * x.stride(1), x.stride(0), num_rows,
                         out.mutable_data_ptr<Out>() + h * out.stride(1), out.stride(0));
        });
    });
}

#if defined(LONGPREFILL_AMX)

constexpr int64_t BLOCK_ROWS = 64;  // rows of x

// fp32 [T, E] of bf16 x [T, D] and weight [E, D], D a multiple of 32: products of bf16 numbers are exact in fp32.
at::Tensor linear_fp32(const at::Tensor& x, const at::Tensor& weight) {
    check_dim(x, "x", 2), check_rows_contiguous(x, "x");
    const int64_t num_rows = x.size(0), depth = x.size(1), num_out = weight.size(0);
    check_whole(weight, "weight", {num_out, depth});
    TORCH_CHECK_VALUE(depth % AMX_DEPTH == 0, "x and weight are ", depth, " wide: must be a multiple of ", AMX_DEPTH);
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
            if (count < BLOCK_ROWS || stride < depth) {  // one shape only, and no rows that overlap
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

// oneDNN multiplies bf16 on AVX-512 only.
bool linear_has_products() { return LANES < 16; }

LONGPREFILL_OPS(linear, m) {
    m.def("gated_silu(Tensor gate_up, float clamp) -> Tensor", TORCH_FN(gated_silu));
    m.def("linear_has_fp32() -> bool", TORCH_FN(linear_has_fp32));
    m.def("linear_has_products() -> bool", TORCH_FN(linear_has_products));
    m.def("linear_products(Tensor x, Tensor weight, bool is_transposed, Tensor(a!) out) -> ()", TORCH_FN(linear_products));
#if defined(LONGPREFILL_AMX)
    m.def("linear_fp32(Tensor x, Tensor weight) -> Tensor", TORCH_FN(linear_fp32));
#endif
}

}  // namespace
}  // namespace longprefill
