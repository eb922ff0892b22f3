// Runs random steps through random stacks of decoder layers, on buffers without a byte to spare,
// once on one thread and once on four: the same bits. Built with sanitizers by
// test_native_build.py; what the numbers should be is tested in Python.
//
// usage: native_sanitize_decoder SEED CALLS INSTRUCTION_SET...; `threads` may be the first set.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <string>
#include <vector>

#include "../decoder_layers/cpu_step.h"
#include "native_sanitize.h"

namespace {

using namespace jaxinfer;

constexpr int64_t kPageSize = 4, kMaxPages = 12;

// Everything that a step points to: vectors keep their place in a deque.
struct Memory {
  std::deque<std::vector<float>> floats;
  std::deque<std::vector<uint8_t>> bytes;
  std::deque<std::vector<int32_t>> numbers;

  float* random_floats(Random& random, int64_t size, float scale) {
    floats.emplace_back(static_cast<size_t>(size));
    for (float& value : floats.back()) value = scale * random.uniform();
    return floats.back().data();
  }
  uint8_t* random_bytes(Random& random, int64_t size) {
    bytes.emplace_back(static_cast<size_t>(size));
    for (uint8_t& byte : bytes.back()) byte = static_cast<uint8_t>(random.below(256));
    return bytes.back().data();
  }
  int32_t* zeros(int64_t size) { return numbers.emplace_back(static_cast<size_t>(size)).data(); }
};

struct Stack {
  StepShape shape{};
  std::vector<Layer> layers;
  std::vector<Rotary> rotaries;
  Memory memory;
  std::vector<float> x;
  std::vector<std::vector<uint8_t>> caches;
};

Product make_product(Random& random, bool may_have_blocks, int64_t rows, int64_t columns,
                     Memory& memory) {
  Product p{};
  p.in_blocks = may_have_blocks && rows % kBlockRows == 0 && random.below(4);
  const Code codes[] = {Code::kInt8, Code::kNibble, Code::kFiveBits};
  p.code = codes[random.below(p.in_blocks ? 3 : 2)];
  p.num_rows = rows, p.num_columns = columns;
  p.group_size = random.below(2) ? 32 : columns;
  p.num_groups = columns / p.group_size;
  p.row_bytes = columns / 8 * (p.code == Code::kInt8 ? 8 : p.code == Code::kNibble ? 4 : 5);
  p.scale_type = p.offset_type = FloatType::kFloat32;
  for (int i = 0; i < 16; ++i) p.table[i] = static_cast<float>(i - 8);
  p.code_bias = p.code == Code::kInt8 ? 128 : p.code == Code::kNibble ? 8 : 16;
  p.codes = memory.random_bytes(random, rows * p.row_bytes);
  p.scale = memory.random_floats(random, rows * p.num_groups, 0.01f);
  if (random.below(2)) p.offset = memory.random_floats(random, rows * p.num_groups, 0.1f);
  return p;
}

// Of `slots` slots in each block, cut into up to three pieces.
Matrix make_matrix(Random& random, bool may_have_blocks, int64_t blocks, int64_t slots,
                   int64_t slot_rows, int64_t columns, Memory& memory) {
  Matrix m{};
  m.num_rows = blocks * slots * slot_rows;
  while (slots > 0) {
    const int64_t taken = m.num_pieces == 2 ? slots : 1 + random.below(static_cast<int>(slots));
    m.block_rows[m.num_pieces] = taken * slot_rows;
    const int64_t rows = blocks * taken * slot_rows;
    m.pieces[m.num_pieces++] = make_product(random, may_have_blocks, rows, columns, memory);
    slots -= taken;
  }
  if (random.below(2)) m.bias = memory.random_floats(random, m.num_rows, 1);
  return m;
}

void make_layer(Random& random, bool may_have_blocks, int64_t num_pages, Stack& stack) {
  const StepShape& s = stack.shape;
  Memory& memory = stack.memory;
  const auto norm = [&](int64_t size, bool exists = true) {
    return exists ? memory.random_floats(random, size, 1) : nullptr;
  };
  const auto matrix = [&](int64_t blocks, int64_t slots, int64_t slot_rows, int64_t columns) {
    return make_matrix(random, may_have_blocks, blocks, slots, slot_rows, columns, memory);
  };
  const bool has_head_norms = random.below(2), has_post_norms = random.below(2);
  Layer layer{};
  layer.input_norm = norm(s.hidden), layer.mlp_input_norm = norm(s.hidden);
  layer.attention_norm = norm(s.hidden, has_post_norms);
  layer.mlp_norm = norm(s.hidden, has_post_norms);
  layer.query_norm = norm(s.head_dim, has_head_norms);
  layer.key_norm = norm(s.head_dim, has_head_norms);
  layer.qkv = matrix(s.num_kv_heads, s.num_heads / s.num_kv_heads + 2, s.head_dim, s.hidden);
  layer.out = matrix(1, 1, s.hidden, s.num_heads * s.head_dim);
  layer.gate_up = matrix(1, 2, s.intermediate, s.hidden);
  layer.down = matrix(1, 1, s.hidden, s.intermediate);
  const Elements types[] = {Elements::kFloat32, Elements::kBfloat16, Elements::kFloat16};
  layer.cache.type = types[random.below(3)];
  layer.cache.num_pages = num_pages, layer.cache.page_size = kPageSize;
  layer.cache.num_kv_heads = s.num_kv_heads, layer.cache.head_dim = s.head_dim;
  const int64_t size = layer.cache.type == Elements::kFloat32 ? 4 : 2;
  const int64_t elements = num_pages * kPageSize * s.num_kv_heads * 2 * s.head_dim;
  stack.caches.emplace_back(static_cast<size_t>(size * elements));  // zeros
  layer.rotary = random.below(2), layer.group = random.below(2);
  layer.window = random.below(2) ? 1 + random.below(20) : std::numeric_limits<int32_t>::max();
  stack.layers.push_back(layer);
}

// Rows whose pages, the same for both groups, are theirs alone; returns how many pages there are.
int64_t make_rows(Random& random, Stack& stack) {
  StepShape& s = stack.shape;
  const bool is_decode = random.below(2);
  const int most_tokens = random.below(3) ? 3 : 40;
  s.rows.num_seqs = random.below(6), s.rows.num_rows = s.rows.num_seqs + random.below(3) + 1;
  int32_t* const starts = stack.memory.zeros(s.rows.num_rows + 1);
  int32_t* const kv_lens = stack.memory.zeros(s.rows.num_rows);
  for (int64_t row = 0; row < s.rows.num_rows; ++row) {
    const bool is_used = row < s.rows.num_seqs;
    const int q_len = !is_used ? 0 : is_decode ? 1 : 1 + random.below(most_tokens);
    starts[row + 1] = starts[row] + q_len;
    if (is_used) {
      kv_lens[row] = q_len + random.below(static_cast<int>(kPageSize * kMaxPages) - q_len + 1);
    }
  }
  s.num_tokens = s.rows.num_tokens = starts[s.rows.num_rows];
  s.all_tokens = is_decode ? s.rows.num_rows : s.num_tokens + random.below(5);
  s.max_pages = kMaxPages;
  int32_t* const slots = stack.memory.zeros(2 * s.all_tokens);
  int32_t* const tables = stack.memory.zeros(2 * s.rows.num_rows * kMaxPages);
  for (int64_t group = 0; group < 2; ++group) {
    for (int64_t row = 0; row < s.rows.num_seqs; ++row) {
      const int64_t first_slot = (1 + row * kMaxPages) * kPageSize;
      for (int64_t page = 0; page < kMaxPages; ++page) {
        const int64_t at = (group * s.rows.num_rows + row) * kMaxPages + page;
        tables[at] = static_cast<int32_t>(1 + row * kMaxPages + page);
      }
      for (int64_t token = starts[row]; token < starts[row + 1]; ++token) {
        const int64_t position = kv_lens[row] - (starts[row + 1] - token);
        slots[group * s.all_tokens + token] = static_cast<int32_t>(first_slot + position);
      }
    }
  }
  s.slots = slots, s.page_tables = tables;
  s.rows.kv_lens = kv_lens, s.rows.cu_q_lens = is_decode ? nullptr : starts;
  return 1 + s.rows.num_rows * kMaxPages;
}

void make(Random& random, const Kernels& kernels, Stack& stack) {
  StepShape& s = stack.shape;
  const int head_dims[] = {8, 16, 32, 48};
  do {
    s.head_dim = random.one_of(head_dims);
    s.num_kv_heads = 1 + random.below(3), s.num_heads = s.num_kv_heads * (1 + random.below(4));
  } while (s.num_heads * s.head_dim % 32 != 0);
  s.hidden = 32 * (1 + random.below(4)), s.intermediate = 32 * (1 + random.below(5));
  s.activation = random.below(2) ? Activation::kSilu : Activation::kGeluTanh;
  s.eps = 1e-5f, s.scale = 0.2f, s.soft_cap = random.below(2) ? 3.0f : 0.0f;
  const int64_t num_pages = make_rows(random, stack);
  if (random.below(3)) s.rounding = kernels.multipliers.rounding_of(s.all_tokens, true);
  for (int i = 0; i < 2; ++i) {
    const int64_t size = s.all_tokens * s.head_dim / 2;
    const float* const cos = stack.memory.random_floats(random, size, 1);
    stack.rotaries.push_back({cos, stack.memory.random_floats(random, size, 1)});
  }
  stack.x.resize(static_cast<size_t>(s.all_tokens * s.hidden));
  for (float& value : stack.x) value = random.uniform();
  for (int count = 1 + random.below(3); count > 0; --count) {
    make_layer(random, kernels.multipliers.blocks != nullptr, num_pages, stack);
  }
}

struct Result {
  std::vector<float> x;
  std::vector<std::vector<uint8_t>> caches;
};

Result run(const Stack& stack, const Kernels& kernels, int64_t num_threads) {
  Result result{stack.x, stack.caches};
  if (stack.shape.num_tokens == 0) return result;  // as the handler does
  std::vector<float> memory(static_cast<size_t>(Workspace::num_floats(stack.shape)), NAN);
  Pool pool;
  Team team(pool, num_threads);
  Step step(stack.shape, stack.rotaries, result.x.data(), memory.data(), kernels, team);
  for (size_t i = 0; i < stack.layers.size(); ++i) {
    Layer layer = stack.layers[i];
    layer.cache.elements = result.caches[i].data();
    step.run(layer);
  }
  return result;
}

bool is_right(const Stack& stack, const Result& alone, const Result& shared) {
  const size_t size = alone.x.size() * sizeof(float);
  if (size != 0 && std::memcmp(alone.x.data(), shared.x.data(), size) != 0) return false;
  if (alone.caches != shared.caches) return false;
  const size_t live = static_cast<size_t>(stack.shape.num_tokens * stack.shape.hidden);
  for (size_t i = 0; i < alone.x.size(); ++i) {
    const bool is_fine = i < live ? std::isfinite(alone.x[i]) : alone.x[i] == stack.x[i];
    if (!is_fine) return false;
  }
  return true;
}

// None for an unknown name.
Kernels find(const std::string& name) {
  const Multipliers multipliers = find_multipliers(name);
  if (multipliers.rows == nullptr) return {};
  const Loops* const attention = find_attention(name);
  if (name == "portable") return {&decoder_loops_portable, attention, multipliers};
#if defined(__x86_64__)
  if (name == "avx2") return {&decoder_loops_avx2, attention, multipliers};
  return {&decoder_loops_avx512, attention, multipliers};
#else
  return {};
#endif
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  for (int i = std::string(argv[3]) == "threads" ? 4 : 3; i < argc; ++i) {
    Random random(static_cast<unsigned>(std::atoi(argv[1])));
    const Kernels kernels = find(argv[i]);
    if (kernels.loops == nullptr) return 2;
    for (int call = 0; call < std::atoi(argv[2]); ++call) {
      Stack stack;
      make(random, kernels, stack);
      if (!is_right(stack, run(stack, kernels, 1), run(stack, kernels, 4))) {
        std::fprintf(stderr, "%s: step %d of %d tokens is wrong\n", argv[i], call,
                     static_cast<int>(stack.shape.num_tokens));
        return 1;
      }
    }
  }
  std::puts("ok");
  return 0;
}
