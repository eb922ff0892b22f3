// One step of tokens through a stack of layers: the order of the stages, and how each is shared
// between threads. A token's numbers never depend on the other tokens, nor on how work is cut.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "../cpp/parallel.h"
#include "../paged_attention/cpu_plan.h"
#include "../quantized_matmul/cpu_multipliers.h"
#include "cpu_decoder.h"

namespace jaxinfer {

// What all layers of a step share.
struct StepShape {
  int64_t num_tokens;  // rows of x that are computed; there may be more
  int64_t hidden, num_heads, num_kv_heads, head_dim, intermediate;
  Activation activation;
  Rounding rounding;  // of tokens that are multiplied by weights in blocks
  float eps, scale, soft_cap;
  const int32_t* slots;        // [num_groups, all_tokens]
  const int32_t* page_tables;  // [num_groups, num_rows, max_pages]
  int64_t all_tokens, max_pages;
  Rows rows;
};

// Cosines and sines of every token, [num_tokens, head_dim / 2].
struct Rotary {
  const float *cos, *sin;
};

// What is multiplied by a matrix: float32, and rounded if the step rounds.
struct Operand {
  float* floats;
  RoundedTokens rounded;

  Operand(const StepShape& s, int64_t size, float* memory)
      : floats(memory), rounded(s.rounding, s.num_tokens, size, memory + s.num_tokens * size) {}

  static int64_t num_floats(int64_t num_tokens, int64_t size) {
    return num_tokens * size + RoundedTokens::num_floats(num_tokens, size);
  }
};

// Arrays of floats in the workspace of a call, for the tokens that are computed.
struct Workspace {
  Operand normed, attended, gated;
  float *qkv, *queries, *new_kv, *projected, *gate_up;

  static int64_t num_floats(const StepShape& s) {
    const int64_t heads = s.num_heads * s.head_dim, kv = 2 * s.num_kv_heads * s.head_dim;
    const int64_t products = (heads + kv) + heads + kv + s.hidden + 2 * s.intermediate;
    return s.all_tokens * products + Operand::num_floats(s.all_tokens, s.hidden) +
           Operand::num_floats(s.all_tokens, heads) +
           Operand::num_floats(s.all_tokens, s.intermediate);
  }

  Workspace(const StepShape& s, float* memory)
      : Workspace(s, memory, s.num_heads * s.head_dim, 2 * s.num_kv_heads * s.head_dim) {}

 private:
  // Members take their memory in the order in which they are declared.
  Workspace(const StepShape& s, float* memory, int64_t heads, int64_t kv)
      : normed(s, s.hidden, take(memory, Operand::num_floats(s.num_tokens, s.hidden))),
        attended(s, heads, take(memory, Operand::num_floats(s.num_tokens, heads))),
        gated(s, s.intermediate, take(memory, Operand::num_floats(s.num_tokens, s.intermediate))),
        qkv(take(memory, s.num_tokens * (heads + kv))),
        queries(take(memory, s.num_tokens * heads)), new_kv(take(memory, s.num_tokens * kv)),
        projected(take(memory, s.num_tokens * s.hidden)),
        gate_up(take(memory, s.num_tokens * 2 * s.intermediate)) {}

  static float* take(float*& memory, int64_t floats) {
    float* const taken = memory;
    memory += floats;
    return taken;
  }
};

// What goes on with one instruction set.
struct Kernels {
  const DecoderLoops* loops;
  const Loops* attention;
  Multipliers multipliers;
};

class Step {
 public:
  Step(const StepShape& shape, const std::vector<Rotary>& rotaries, float* x, float* memory,
       const Kernels& kernels, Team& team)
      : s_(shape), rotaries_(rotaries), x_(x), work_(shape, memory), kernels_(kernels),
        loops_(*kernels.loops), attention_(*kernels.attention), team_(team) {}

  void run(const Layer& layer) {
    normalize_x(layer.input_norm);
    multiply(layer.qkv, work_.normed, work_.qkv);
    rotate_and_write(layer);
    attend(layer);
    multiply(layer.out, work_.attended, work_.projected);
    add_to_x(layer.out, layer.attention_norm);
    normalize_x(layer.mlp_input_norm);
    if (can_gate_products(layer)) {
      multiply_and_gate(layer.gate_up.pieces[0]);
    } else {
      multiply(layer.gate_up, work_.normed, work_.gate_up);
      gate(layer.gate_up);
    }
    multiply(layer.down, work_.gated, work_.projected);
    add_to_x(layer.down, layer.mlp_norm);
  }

 private:
  // Attention of layers with one page table and one window: the same tiles of the same rows.
  struct Planned {
    int64_t group, window;
    Attention attention;
    std::unique_ptr<Plan> plan;
  };

  // Tokens whose elementwise work is worth handing to another thread.
  static constexpr int64_t kTokensPerChunk = 4;
  static constexpr int64_t kTinyAttention = 1 << 16;

  void round(const Operand& operand, int64_t token) const {
    if (!s_.rounding) return;
    operand.rounded.pack(operand.floats + token * operand.rounded.num_columns, token);
  }

  template <class Work>
  void for_tokens(Work work) {
    // Threads write to no cache line together.
    const int64_t of_chunk = s_.rounding.bytes ? kByteTokens : kTokensPerChunk;
    team_.run((s_.num_tokens + of_chunk - 1) / of_chunk, [&](int64_t chunk) {
      const int64_t end = std::min((chunk + 1) * of_chunk, s_.num_tokens);
      for (int64_t token = chunk * of_chunk; token < end; ++token) work(token);
    });
  }

  void normalize_x(const float* weight) {
    for_tokens([&](int64_t token) {
      const int64_t at = token * s_.hidden;
      loops_.normalize(x_ + at, weight, s_.eps, s_.hidden, work_.normed.floats + at);
      round(work_.normed, token);
    });
  }

  // The products of all pieces, each in an array of its own: piece after piece in `out`.
  void multiply(const Matrix& matrix, const Operand& x, float* out) {
    Product products[Matrix::kMostPieces];
    int64_t first_chunk[Matrix::kMostPieces + 1] = {};
    const int64_t rows = rows_per_chunk(matrix.num_rows, s_.num_tokens, team_.num_threads());
    for (int i = 0; i < matrix.num_pieces; ++i) {
      Product& p = products[i] = matrix.pieces[i];
      p.x = x.floats, p.out = out, p.num_tokens = s_.num_tokens;
      p.has_many_tokens = s_.all_tokens >= kManyTokens;
      out += s_.num_tokens * p.num_rows;
      first_chunk[i + 1] = first_chunk[i] + (p.num_rows + rows - 1) / rows;
    }
    team_.run(first_chunk[matrix.num_pieces], [&](int64_t chunk) {
      int i = 0;
      while (chunk >= first_chunk[i + 1]) ++i;
      const int64_t begin = (chunk - first_chunk[i]) * rows;
      const int64_t end = std::min(begin + rows, products[i].num_rows);
      kernels_.multipliers.multiply(products[i], x.rounded, begin, end);
    });
  }

  // Where `multiply` left a row of a token's block.
  const float* find(const Matrix& matrix, const float* products, int64_t token, int64_t block,
                    int64_t row) const {
    int i = 0;
    for (; i + 1 < matrix.num_pieces && row >= matrix.block_rows[i]; ++i) {
      row -= matrix.block_rows[i];
      products += s_.num_tokens * matrix.pieces[i].num_rows;
    }
    return products + token * matrix.pieces[i].num_rows + block * matrix.block_rows[i] + row;
  }

  void rotate_and_write(const Layer& layer) {
    const int64_t size = s_.head_dim, heads = s_.num_heads / s_.num_kv_heads;
    const int64_t kv_floats = 2 * s_.num_kv_heads * size;
    const Rotary& rotary = rotaries_[static_cast<size_t>(layer.rotary)];
    for_tokens([&](int64_t token) {
      float* const scratch = thread_scratch(2 * size);
      float* to_query = work_.queries + token * s_.num_heads * size;
      float* const to_kv = work_.new_kv + token * kv_floats;
      const int64_t angle = token * size / 2;
      for (int64_t block = 0; block < s_.num_kv_heads; ++block) {
        for (int64_t slot = 0; slot < heads + 2; ++slot) {
          const float* from = find(layer.qkv, work_.qkv, token, block, slot * size);
          if (layer.qkv.bias) {
            std::memcpy(scratch, from, static_cast<size_t>(size) * sizeof(float));
            loops_.add(layer.qkv.bias + (block * (heads + 2) + slot) * size, size, scratch);
            from = scratch;
          }
          if (slot == heads + 1) {
            float* const value = to_kv + (2 * block + 1) * size;
            std::memcpy(value, from, static_cast<size_t>(size) * sizeof(float));
            continue;
          }
          const float* const norm = slot < heads ? layer.query_norm : layer.key_norm;
          if (norm) {
            loops_.normalize(from, norm, s_.eps, size, scratch + size);
            from = scratch + size;
          }
          float* const to = slot < heads ? to_query : to_kv + 2 * block * size;
          loops_.rotate(from, rotary.cos + angle, rotary.sin + angle, size / 2, to);
          if (slot < heads) to_query += size;
        }
      }
      attention_.write({layer.cache, to_kv, s_.slots + layer.group * s_.all_tokens + token, 1});
    });
  }

  void attend(const Layer& layer) {
    Planned& planned = plan(layer);
    Attention& p = planned.attention;
    p.cache = layer.cache;
    Plan& plan = *planned.plan;
    const auto run = [&](int64_t i) {
      attention_.attend(p, plan.tiles[static_cast<size_t>(i)],
                        thread_scratch(plan.scratch_floats));
    };
    const int64_t num_tiles = static_cast<int64_t>(plan.tiles.size());
    if (plan.is_tiny) {
      for (int64_t i = 0; i < num_tiles; ++i) run(i);
    } else {
      team_.run(num_tiles, run);
    }
    for (const Tile& tile : plan.merges) attention_.merge(p, tile);
    if (!s_.rounding) return;
    for_tokens([&](int64_t token) { round(work_.attended, token); });
  }

  Planned& plan(const Layer& layer) {
    for (auto& planned : plans_) {
      if (planned->group == layer.group && planned->window == layer.window) return *planned;
    }
    auto planned = std::make_unique<Planned>();
    planned->group = layer.group, planned->window = layer.window;
    Attention& p = planned->attention;
    p.cache = layer.cache, p.q = work_.queries, p.out = work_.attended.floats;
    p.page_table = s_.page_tables + layer.group * s_.rows.num_rows * s_.max_pages;
    p.num_heads = s_.num_heads, p.max_pages = s_.max_pages;
    p.window = layer.window, p.scale = s_.scale, p.soft_cap = s_.soft_cap;
    planned->plan = std::make_unique<Plan>(p, s_.rows, tile_rows(attention_, p.cache),
                                          team_.num_threads(), kTinyAttention);
    plans_.push_back(std::move(planned));
    return *plans_.back();
  }

  Gate* activate() const { return loops_.gates[static_cast<int>(s_.activation)]; }

  // Whether gates and ups need not be written: many tokens in tiles, which only blocks read.
  bool can_gate_products(const Layer& layer) const {
    const Matrix &gate_up = layer.gate_up, &down = layer.down;
    if (s_.all_tokens < kManyTokens || !s_.rounding.bfloat16 || s_.rounding.integers || s_.rounding.bytes) return false;
    if (!s_.rounding.bfloat16->multiply_gated || gate_up.num_pieces != 1 || gate_up.bias) {
      return false;
    }
    bool are_in_blocks = gate_up.pieces[0].in_blocks && s_.intermediate % kBlockRows == 0;
    for (int i = 0; i < down.num_pieces; ++i) are_in_blocks &= down.pieces[i].in_blocks;
    return are_in_blocks;
  }

  void multiply_and_gate(Product p) {
    p.num_tokens = s_.num_tokens, p.has_many_tokens = true;
    const int64_t rows = rows_per_chunk(s_.intermediate, p.num_tokens, team_.num_threads());
    team_.run((s_.intermediate + rows - 1) / rows, [&](int64_t chunk) {
      const int64_t end = std::min((chunk + 1) * rows, s_.intermediate);
      s_.rounding.bfloat16->multiply_gated(p, work_.normed.rounded.bfloat16, activate(),
                                           chunk * rows, end, work_.gated.rounded.bfloat16);
    });
  }

  void gate(const Matrix& gate_up) {
    const int64_t size = s_.intermediate;
    for_tokens([&](int64_t token) {
      const float* gates = find(gate_up, work_.gate_up, token, 0, 0);
      const float* ups = find(gate_up, work_.gate_up, token, 0, size);
      if (gate_up.bias) {
        // Products are in this call's own memory: changed in place.
        loops_.add(gate_up.bias, size, const_cast<float*>(gates));
        loops_.add(gate_up.bias + size, size, const_cast<float*>(ups));
      }
      activate()(gates, ups, size, work_.gated.floats + token * size);
      round(work_.gated, token);
    });
  }

  void add_to_x(const Matrix& matrix, const float* norm) {
    for_tokens([&](int64_t token) {
      const int64_t at = token * s_.hidden;
      float* const added = work_.projected + at;
      if (matrix.bias) loops_.add(matrix.bias, s_.hidden, added);
      if (norm) loops_.normalize(added, norm, s_.eps, s_.hidden, added);
      loops_.add(added, s_.hidden, x_ + at);
    });
  }

  const StepShape& s_;
  const std::vector<Rotary>& rotaries_;
  float* const x_;  // [num_tokens, hidden]
  const Workspace work_;
  const Kernels& kernels_;
  const DecoderLoops& loops_;
  const Loops& attention_;
  Team& team_;
  std::vector<std::unique_ptr<Planned>> plans_;
};

}  // namespace jaxinfer
