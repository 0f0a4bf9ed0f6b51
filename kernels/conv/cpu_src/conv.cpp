// Depthwise causal convolution and SiLU over strips of channels: a strip's taps and its last W - 1 rows stay in L1.
#include <algorithm>
#include <vector>

#include "longprefill/torch.h"

namespace longprefill {
namespace {

constexpr int64_t STRIP = 512;       // channels: 2 KiB a row, so that reads from memory are long
constexpr int64_t ROWS = 256;        // rows a task of one thread

// Rows [first, end) of one segment that starts at row `start`, channels [from, to). x rows are x_stride apart.
template <typename T, typename H>
void strip(const T* x, int64_t x_stride, const H* history, const float* taps, T* out, int64_t channels, int width,
           int64_t start, int64_t first, int64_t end, int64_t from, int64_t to) {
    for (int64_t row = first; row < end; ++row) {
        const int before = static_cast<int>(std::min<int64_t>(row - start, width - 1));  // taps on rows of the segment
        for_each_vector(to - from, [&](int64_t offset, int count) {
            const int64_t c = from + offset;
            Vec total{};
            for (int tap = 0; tap < width - 1 - before; ++tap)
                total += load_some(history + (row - start + tap) * channels + c, count) *
                         load_some(taps + tap * channels + c, count);
            for (int tap = width - 1 - before; tap < width; ++tap)
                total += load_some(x + (row - width + 1 + tap) * x_stride + c, count) *
                         load_some(taps + tap * channels + c, count);
            store_some(out + row * channels + c, total * sigmoid(total), count);
        });
    }
}

// The same for four taps and rows that have all of them in the segment: the window moves through registers.
template <typename T>
void strip_of_four(const T* x, int64_t x_stride, const float* taps, T* out, int64_t channels, int64_t first,
                   int64_t end, int64_t from, int64_t to) {
    constexpr int64_t BLOCK = 16;
    for (int64_t block = first; block < end; block += BLOCK) {
        const int64_t last = std::min(block + BLOCK, end);
        for_each_vector(to - from, [&](int64_t offset, int count) {
            const int64_t c = from + offset;
            const Vec w0 = load_some(taps + c, count), w1 = load_some(taps + channels + c, count);
            const Vec w2 = load_some(taps + 2 * channels + c, count), w3 = load_some(taps + 3 * channels + c, count);
            const T* row_x = x + block * x_stride + c;
            Vec a = load_some(row_x - 3 * x_stride, count), b = load_some(row_x - 2 * x_stride, count);
            Vec d = load_some(row_x - x_stride, count);
            for (int64_t row = block; row < last; ++row, row_x += x_stride) {
                const Vec e = load_some(row_x, count);
                const Vec total = w0 * a + w1 * b + w2 * d + w3 * e;
                store_some(out + row * channels + c, total * sigmoid(total), count);
                a = b, b = d, d = e;
            }
        });
    }
}

// x [T, C], weight fp32 [W, C] (tap first), history [N, W - 1, C] in x's dtype or fp32.
at::Tensor causal_conv_silu(const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef offsets,
                            const at::Tensor& history) {
    check_dim(x, "x", 2), check_rows_contiguous(x, "x");
    const int64_t channels = x.size(1), stride = x.stride(0);
    const int width = static_cast<int>(weight.size(0));
    check_whole(weight, "weight, taps first,", {width, channels});
    check_whole(history, "history", {static_cast<int64_t>(offsets.size()) - 1, width - 1, channels});
    at::Tensor out = at::empty({x.size(0), channels}, x.options());
    struct Task { int64_t segment, first, end, from, to; };
    std::vector<Task> tasks;
    for (size_t segment = 0; segment + 1 < offsets.size(); ++segment)
        for (int64_t first = offsets[segment]; first < offsets[segment + 1]; first += ROWS)
            for (int64_t from = 0; from < channels; from += STRIP)
                tasks.push_back({static_cast<int64_t>(segment), first, std::min(first + ROWS, offsets[segment + 1]),
                                 from, std::min(from + STRIP, channels)});
    const float* taps = weight.const_data_ptr<float>();
    for_float_type(x, "x", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for_float_type(history, "history", [&](auto* history_type) {
            using H = std::remove_pointer_t<decltype(history_type)>;
            const T* x_data = x.const_data_ptr<T>();
            const H* history_data = history.const_data_ptr<H>();
            T* out_data = out.mutable_data_ptr<T>();
            at::parallel_for(0, static_cast<int64_t>(tasks.size()), 1, [&](int64_t begin, int64_t stop) {
                for (int64_t i = begin; i < stop; ++i) {
                    const Task& task = tasks[i];
                    const int64_t start = offsets[task.segment];
                    const int64_t full =
                        width == 4 ? std::min(task.end, std::max(task.first, start + width - 1)) : task.end;
                    strip(x_data, stride, history_data + task.segment * (width - 1) * channels, taps, out_data,
                          channels, width, start, task.first, full, task.from, task.to);
                    if (full < task.end)
                        strip_of_four(x_data, stride, taps, out_data, channels, full, task.end, task.from, task.to);
                }
            });
        });
    });
    return out;
}

}  // namespace

LONGPREFILL_OPS(conv, m) {
    m.def("causal_conv_silu(Tensor x, Tensor weight, int[] offsets, Tensor history) -> Tensor",
          TORCH_FN(causal_conv_silu));
}

}  // namespace longprefill
