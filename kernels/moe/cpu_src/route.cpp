// Experts of every token by score: one pass over a row of logits, the best kept in order as they come.
#include <algorithm>
#include <cmath>
#include <optional>

#include "longprefill/buffer.h"
#include "longprefill/torch.h"

namespace longprefill {
namespace {

struct Router {
    int64_t num_experts, topk, num_groups, topk_groups;
    bool is_softmax, normalizes;
    float scale;
    const float* bias;  // or null
};

// One token at work: the scores of its experts, which of them compete, and the best so far.
class Token {
public:
    explicit Token(const Router& router)
        : router_(router), scores_(router.num_experts), choice_(router.num_experts), groups_(router.num_groups),
          best_(std::max(router.topk, router.topk_groups)) {}

    void run(const float* logits, int64_t* experts, float* weights) {
        score(logits);
        for (int64_t e = 0; e < router_.num_experts; ++e) {
            const float value = router_.bias == nullptr ? scores_[e] : scores_[e] + router_.bias[e];
            choice_[e] = value == value ? value : INFINITY;  // torch sorts NaN in front
        }
        if (router_.topk_groups < router_.num_groups) close_groups();
        keep_best(choice_.get(), router_.num_experts, router_.topk);
        float total = 0.0f;
        for (int64_t a = 0; a < router_.topk; ++a) {
            experts[a] = best_[a];
            weights[a] = scores_[best_[a]];
            total += weights[a];
        }
        for (int64_t a = 0; a < router_.topk; ++a)
            weights[a] = (router_.normalizes ? weights[a] / (total + 1e-20f) : weights[a]) * router_.scale;
    }

private:
    void score(const float* logits) {
        const int64_t size = router_.num_experts;
        if (!router_.is_softmax) {
            for_each_vector(size, [&](int64_t e, int count) {
                const Vec x = load_some(logits + e, count), z = exp(-absolute(x));
                store_some(scores_.get() + e, (x < 0.0f ? z : splat(1.0f)) / (1.0f + z), count);
            });
            return;
        }
        float top = logits[0], total = 0.0f;
        for (int64_t e = 1; e < size; ++e) top = std::max(top, logits[e]);
        for_each_vector(size, [&](int64_t e, int count) {
            store_some(scores_.get() + e, exp(load_some(logits + e, count) - splat(top)), count);
        });
        for (int64_t e = 0; e < size; ++e) total += scores_[e];
        for (int64_t e = 0; e < size; ++e) scores_[e] /= total;
    }

    // Numbers of the `count` best of `values`, best first, the lower number first where they are equal.
    void keep_best(const float* values, int64_t size, int64_t count) {
        for (int64_t i = 0, kept = 0; i < size; ++i) {
            if (kept == count && !(values[i] > values[best_[count - 1]])) continue;
            int64_t place = kept < count ? kept++ : count - 1;
            for (; place > 0 && values[i] > values[best_[place - 1]]; --place) best_[place] = best_[place - 1];
            best_[place] = i;
        }
    }

    // Experts outside of the groups with the best two experts together lose.
    void close_groups() {
        const int64_t size = router_.num_experts / router_.num_groups;
        for (int64_t g = 0; g < router_.num_groups; ++g) {
            float first = -INFINITY, second = -INFINITY;
            for (int64_t e = g * size; e < (g + 1) * size; ++e) {
                second = std::max(second, std::min(first, choice_[e]));
                first = std::max(first, choice_[e]);
            }
            groups_[g] = size > 1 ? first + second : first;
        }
        keep_best(groups_.get(), router_.num_groups, router_.topk_groups);
        std::fill_n(groups_.get(), router_.num_groups, 0.0f);
        for (int64_t i = 0; i < router_.topk_groups; ++i) groups_[best_[i]] = 1.0f;
        for (int64_t e = 0; e < router_.num_experts; ++e)
            if (groups_[e / size] == 0.0f) choice_[e] = -INFINITY;
    }

    const Router& router_;
    Buffer<float> scores_, choice_, groups_;
    Buffer<int64_t> best_;
};

// (experts int64 [T, A], weights fp32 [T, A]) of logits fp32 [T, E].
std::tuple<at::Tensor, at::Tensor> moe_route(const at::Tensor& logits, const std::optional<at::Tensor>& bias,
                                             int64_t topk, bool is_softmax, int64_t num_groups, int64_t topk_groups,
                                             bool normalizes, double scale) {
    check_fp32(logits, "logits"), check_dim(logits, "logits", 2), check_contiguous(logits, "logits");
    if (bias) check_whole(*bias, "bias", {logits.size(1)});
    const Router router{logits.size(1), topk, num_groups, topk_groups, is_softmax, normalizes,
                        static_cast<float>(scale), bias ? bias->const_data_ptr<float>() : nullptr};
    at::Tensor experts = at::empty({logits.size(0), topk}, logits.options().dtype(at::kLong));
    at::Tensor weights = at::empty({logits.size(0), topk}, logits.options());
    const float* data = logits.const_data_ptr<float>();
    int64_t* expert_data = experts.mutable_data_ptr<int64_t>();
    float* weight_data = weights.mutable_data_ptr<float>();
    at::parallel_for(0, logits.size(0), 256, [&](int64_t first, int64_t last) {
        Token token(router);
        for (int64_t t = first; t < last; ++t)
            token.run(data + t * router.num_experts, expert_data + t * topk, weight_data + t * topk);
    });
    return {experts, weights};
}

LONGPREFILL_OPS(moe_route, m) {
    m.def("moe_route(Tensor logits, Tensor? bias, int topk, bool is_softmax, int num_groups, int topk_groups, "
          "bool normalizes, float scale) -> (Tensor, Tensor)",
          TORCH_FN(moe_route));
}

}  // namespace
}  // namespace longprefill
