// Writes tests/data/llama_samplers.json: what llama.cpp's samplers leave of fixed logits.
//
//   cmake -B build -DLLAMA_CURL=OFF LLAMA_CPP && cmake --build build --target llama
//   g++ -std=c++17 -ILLAMA_CPP/include -ILLAMA_CPP/ggml/include llama_samplers.cpp -Lbuild/bin -lllama -lggml-base
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "llama.h"

llama_sampler* llama_sampler_init_dry_testing(float multiplier, float base, int32_t allowed_length,
                                              int32_t last_n,
                                              const std::vector<std::vector<llama_token>>& breakers);

constexpr int kVocab = 300;

// Different for each token; tests/unit/causal/test_llama_samplers.py has the same.
std::vector<llama_token_data> logits(int seed, double scale) {
  std::vector<llama_token_data> data(kVocab);
  for (int i = 0; i < kVocab; ++i) {
    const int m = (i * 7919 + seed * 104729) % 1009 - 504;
    data[i] = {i, static_cast<float>(scale * m * std::abs(m) / 254016.0), 0.0f};
  }
  return data;
}

struct Chain {
  int seed;
  double scale;
  float top_n_sigma;
  int top_k;
  float typical_p, top_p, min_p, xtc_threshold, temperature, range, exponent;
};

const Chain kChains[] = {
    {1, 8, 1.0f, 0, 1, 1, 0, 1, 1, 0, 1},
    {2, 8, 2.5f, 40, 1, 1, 0, 1, 0.7f, 0, 1},
    {3, 16, 0.4f, 0, 1, 0.9f, 0.02f, 1, 1.5f, 0, 1},
    {4, 20, 0, 0, 1, 1, 0, 0.05f, 1, 0, 1},
    {5, 20, 0, 0, 1, 1, 0, 0.001f, 1.3f, 0, 1},
    {6, 20, 0, 30, 1, 0.97f, 0, 0.02f, 0.8f, 0, 1},
    {7, 24, 0, 0, 1, 1, 0.01f, 0.2f, 1, 0, 1},
    {8, 8, 0, 0, 1, 1, 0, 0.4f, 1, 0, 1},
    {9, 10, 0, 0, 1, 1, 0, 1, 1, 0.5f, 1},
    {10, 20, 0, 0, 1, 1, 0, 1, 1, 1.0f, 1},
    {11, 20, 0, 50, 1, 1, 0.01f, 1, 1.2f, 0.6f, 0.5f},
    {12, 30, 0, 0, 1, 0.99f, 0, 1, 0.8f, 0.8f, 2.0f},
    {13, 12, 0, 0, 0.7f, 1, 0, 1, 0.9f, 0.2f, 1},
    {14, 12, 0, 0, 0.8f, 0.9f, 0.1f, 0.01f, 0.9f, 0, 1},
    {15, 14, 3.0f, 60, 0.9f, 0.95f, 0.02f, 0.03f, 1.1f, 0.3f, 1.5f},
    {16, 200, 0, 0, 1, 1, 0, 1, 1, 0.5f, 1},
};

struct Mirostat {
  int seed;
  double scale;
  float temperature, tau, eta;
};

const Mirostat kMirostats[] = {{1, 12, 1, 3, 0.1f}, {2, 20, 0.8f, 2, 0.5f}, {3, 6, 1.5f, 5, 0.1f}, {4, 20, 1, 0.1f, 1}};

struct Dry {
  float multiplier, base;
  int allowed, last_n;
  std::vector<std::vector<llama_token>> breakers;
  std::vector<llama_token> tokens;
};

std::vector<llama_token> random_tokens(int seed, int count, int kinds) {
  std::vector<llama_token> tokens(count);
  unsigned state = seed * 2654435761u + 1u;
  for (auto& token : tokens) {
    state = state * 1664525u + 1013904223u;
    token = (state >> 16) % kinds;
  }
  return tokens;
}

int main() {
  std::printf("{\n\"chains\": [");
  const char* comma = "\n";
  for (const auto& c : kChains) {
    auto data = logits(c.seed, c.scale);
    llama_token_data_array all = {data.data(), data.size(), -1, false};
    auto* chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
    for (auto* each :
         {llama_sampler_init_top_n_sigma(c.top_n_sigma), llama_sampler_init_top_k(c.top_k),
          llama_sampler_init_typical(c.typical_p, 0), llama_sampler_init_top_p(c.top_p, 0),
          llama_sampler_init_min_p(c.min_p, 0), llama_sampler_init_xtc(1.0f, c.xtc_threshold, 0, 1),
          llama_sampler_init_temp_ext(c.temperature, c.range, c.exponent)})
      llama_sampler_chain_add(chain, each);
    llama_sampler_apply(chain, &all);
    double greatest = -INFINITY, total = 0;
    for (size_t i = 0; i < all.size; ++i) greatest = std::max<double>(greatest, all.data[i].logit);
    for (size_t i = 0; i < all.size; ++i) total += std::exp(all.data[i].logit - greatest);
    std::printf("%s{\"seed\": %d, \"scale\": %g, \"top_n_sigma\": %g, \"top_k\": %d, \"typical_p\": %g, \"top_p\": %g, "
                "\"min_p\": %g, \"xtc_threshold\": %g, \"temperature\": %g, \"dynatemp_range\": %g, \"dynatemp_exponent\": %g, \"left\": {",
                comma, c.seed, c.scale, c.top_n_sigma, c.top_k, c.typical_p, c.top_p, c.min_p,
                c.xtc_threshold, c.temperature, c.range, c.exponent);
    const char* inner = "";
    for (size_t i = 0; i < all.size; ++i) {
      const double p = std::exp(all.data[i].logit - greatest) / total;
      if (p > 1e-8) std::printf("%s\"%d\": %.7g", inner, all.data[i].id, p), inner = ", ";
    }
    std::printf("}}");
    comma = ",\n";
    llama_sampler_free(chain);
  }
  std::printf("],\n\"mirostats\": [");
  comma = "\n";
  for (const auto& m : kMirostats) {
    auto* temperature = llama_sampler_init_temp(m.temperature);
    auto* mirostat = llama_sampler_init_mirostat_v2(7, m.tau, m.eta);
    std::printf("%s{\"seed\": %d, \"scale\": %g, \"temperature\": %g, \"mirostat_tau\": %g, \"mirostat_eta\": %g, \"draws\": [",
                comma, m.seed, m.scale, m.temperature, m.tau, m.eta);
    for (int step = 0; step < 12; ++step) {
      auto data = logits(m.seed + step, m.scale);
      llama_token_data_array all = {data.data(), data.size(), -1, false};
      llama_sampler_apply(temperature, &all);
      llama_sampler_apply(mirostat, &all);
      std::printf("%s{\"left\": %zu, \"drawn\": %d, \"p\": %.8g}", step ? ", " : "", all.size,
                  all.data[all.selected].id, all.data[all.selected].p);
    }
    std::printf("]}");
    comma = ",\n";
  }
  std::vector<Dry> dries = {
      {0.8f, 1.75f, 2, 64, {}, {0, 1, 2, 2, 1, 2, 3, 0, 1, 2}},
      {0.8f, 1.75f, 2, 64, {{2}}, {0, 1, 2, 2, 1, 2, 3, 0, 1, 2}},
      {1.0f, 2.0f, 0, 64, {{9}}, {4, 5, 9, 6, 4, 5}},
      {1.5f, 1.2f, 1, 8, {{9}}, {1, 2, 3, 9, 1, 2, 3, 5, 1, 2, 3, 6, 1, 2}},
      {0.5f, 1.1f, 3, 200, {{250}}, std::vector<llama_token>(150, 7)},
      {2.0f, 3.0f, 1, 100, {{5, 6}, {5}, {6, 7, 8}}, random_tokens(3, 90, 9)},
      {2.0f, 3.0f, 1, 100, {{5, 6}, {6, 7, 8}}, {1, 2, 3, 6, 7, 8, 1, 2, 3, 5, 6, 1, 2}},
      {1.0f, 1.0f, 2, 100, {{60}}, random_tokens(8, 100, 3)},
  };
  for (int seed = 0; seed < 8; ++seed)
    dries.push_back({0.8f, 1.75f, 2, 50 + 20 * seed, {{0}, {1, 2}}, random_tokens(seed, 120, 4 + seed)});
  std::printf("],\n\"dry\": [");
  comma = "\n";
  const auto list = [](const std::vector<llama_token>& tokens) {
    std::printf("[");
    for (size_t i = 0; i < tokens.size(); ++i) std::printf("%s%d", i ? ", " : "", tokens[i]);
    std::printf("]");
  };
  for (const auto& d : dries) {
    auto* dry = llama_sampler_init_dry_testing(d.multiplier, d.base, d.allowed, d.last_n, d.breakers);
    for (auto token : d.tokens) llama_sampler_accept(dry, token);
    std::vector<llama_token_data> data(kVocab);
    for (int i = 0; i < kVocab; ++i) data[i] = {i, 0.0f, 0.0f};
    llama_token_data_array all = {data.data(), data.size(), -1, false};
    llama_sampler_apply(dry, &all);
    std::printf("%s{\"multiplier\": %g, \"base\": %g, \"allowed_length\": %d, \"last_n\": %d, \"breakers\": [", comma,
                d.multiplier, d.base, d.allowed, d.last_n);
    for (size_t i = 0; i < d.breakers.size(); ++i) {
      if (i) std::printf(", ");
      list(d.breakers[i]);
    }
    std::printf("], \"tokens\": ");
    list(d.tokens);
    std::printf(", \"penalties\": {");
    const char* inner = "";
    for (const auto& each : data)
      if (each.logit != 0.0f) std::printf("%s\"%d\": %.8g", inner, each.id, -each.logit), inner = ", ";
    std::printf("}}");
    comma = ",\n";
    llama_sampler_free(dry);
  }
  std::printf("]\n}\n");
}
