// Runs random steps through the C++ loops of paged attention, on buffers without a byte to spare
// and with NaN wherever nothing may be read, and holds the results to plain loops. Built with
// sanitizers by test_native_build.py.
//
// usage: native_sanitize_attention SEED CALLS INSTRUCTION_SET...; `threads` first races a pool.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../../kernels/paged_attention/cpu_attention.h"
#include "../../kernels/paged_attention/cpu_plan.h"
#include "../cpp/parallel.h"
#include "native_sanitize.h"

namespace {

using namespace jaxinfer;

// Elements that every type holds exactly: multiples of 1/8 up to 2 and, of int8, codes.
float element(Random& random) { return static_cast<float>(random.below(33) - 16) / 8.0f; }

struct Step {
  Attention p{};
  Rows rows{};
  std::vector<float> q, out, new_kv, numbers, scales, scale_of_slot;
  std::vector<uint8_t> elements;
  std::vector<int32_t> page_table, kv_lens, cu_q_lens, slots;
};

// Slots of a row's keys.
int64_t slot_of(const Step& step, int64_t row, int64_t key) {
  const Cache& cache = step.p.cache;
  const int64_t page = step.page_table[static_cast<size_t>(row * step.p.max_pages +
                                                           key / cache.page_size)];
  return page * cache.page_size + key % cache.page_size;
}

size_t element_bytes(Elements type) {
  return type == Elements::kFloat32 ? 4 : type == Elements::kInt8 ? 1 : 2;
}

void make_rows(Random& random, Step& step) {
  Cache& cache = step.p.cache;
  const int num_rows = 1 + random.below(4);
  int32_t num_pages = 1, num_tokens = 0;
  const int64_t page_size = 1 << random.below(6);
  step.p.max_pages = 2 + 400 / page_size;
  for (int row = 0; row < num_rows; ++row) {
    const int32_t q_len = 1 + (random.below(2) ? random.below(60) : 0);
    const int32_t kv_len = q_len + random.below(random.below(2) ? 340 : 5);
    step.cu_q_lens.push_back(num_tokens);
    step.kv_lens.push_back(kv_len);
    num_tokens += q_len;
    for (int64_t page = 0; page < step.p.max_pages; ++page) {
      step.page_table.push_back(page * page_size < kv_len ? num_pages++ : 0);
    }
  }
  step.cu_q_lens.push_back(num_tokens);
  cache.num_pages = num_pages, cache.page_size = page_size;
  const int64_t padding = random.below(3);
  step.rows = {step.kv_lens.data(), step.cu_q_lens.data(), num_rows, num_tokens + padding,
               num_rows};
}

void make(Random& random, Step& step) {
  Attention& p = step.p;
  Cache& cache = p.cache;
  make_rows(random, step);
  cache.type = static_cast<Elements>(random.below(4));
  cache.num_kv_heads = 1 + random.below(2);
  cache.head_dim = 8 * (1 + random.below(random.below(4) ? 6 : 20));
  p.num_heads = cache.num_kv_heads * (1 + random.below(random.below(3) ? 4 : 20));
  p.window = random.below(2) ? 1 + random.below(100) : 1 << 30;
  p.scale = 0.3f, p.soft_cap = random.below(3) ? 0.0f : 2.0f;
  const int64_t head_bytes = cache.head_dim * static_cast<int64_t>(element_bytes(cache.type));
  const int64_t num_slots = cache.num_pages * cache.page_size;
  step.elements.assign(static_cast<size_t>(num_slots * cache.num_kv_heads * 2 * head_bytes), 255);
  if (cache.type == Elements::kInt8) {
    step.scales.assign(static_cast<size_t>(num_slots * cache.num_kv_heads * 2), NAN);
    cache.scales = step.scales.data();
  }
  cache.elements = step.elements.data();
  const int64_t row_size = cache.num_kv_heads * 2 * cache.head_dim;
  step.numbers.assign(static_cast<size_t>(num_slots * row_size), NAN);
  for (int64_t row = 0; row < step.rows.num_rows; ++row) {
    for (int64_t key = 0; key < step.kv_lens[static_cast<size_t>(row)]; ++key) {
      step.slots.push_back(static_cast<int32_t>(slot_of(step, row, key)));
      for (int64_t i = 0; i < row_size; ++i) {
        // The largest of each head is 127/64, so that codes are multiples of 1/64.
        const float value = cache.type == Elements::kInt8
                                ? (i % cache.head_dim == 0 ? 127.0f : random.below(200) - 100.0f) / 64
                                : element(random);
        step.new_kv.push_back(value);
        step.numbers[static_cast<size_t>(step.slots.back() * row_size + i)] = value;
      }
    }
  }
  step.new_kv.shrink_to_fit(), step.slots.shrink_to_fit(), step.page_table.shrink_to_fit();
  step.kv_lens.shrink_to_fit(), step.cu_q_lens.shrink_to_fit();
  step.rows.kv_lens = step.kv_lens.data(), step.rows.cu_q_lens = step.cu_q_lens.data();
  p.page_table = step.page_table.data();
  step.q.resize(static_cast<size_t>(step.rows.num_tokens * p.num_heads * cache.head_dim));
  for (float& value : step.q) value = random.uniform();
  step.out.assign(step.q.size(), NAN);
  p.q = step.q.data(), p.out = step.out.data();
}

void attend(const Step& step, const Loops& loops, bool threads) {
  Pool pool;
  const Plan plan(step.p, step.rows, tile_rows(loops, step.p.cache), threads ? 4 : 1);
  const auto run = [&](int64_t i) {
    std::vector<float> scratch(static_cast<size_t>(plan.scratch_floats), NAN);
    loops.attend(step.p, plan.tiles[static_cast<size_t>(i)], scratch.data());
  };
  run_chunks(pool, threads ? 4 : 1, static_cast<int64_t>(plan.tiles.size()), run);
  for (const Tile& tile : plan.merges) loops.merge(step.p, tile);
}

// The bits may not depend on how work is cut: into parts, or into tiles that follow one another.
bool is_the_same_in_parts(const Step& step, const Loops& loops) {
  const std::vector<float> whole = step.out;
  const Plan plan(step.p, step.rows, tile_rows(loops, step.p.cache), 3, 0);
  std::vector<float> scratch(static_cast<size_t>(plan.scratch_floats), NAN);
  for (size_t i = plan.tiles.size(); i-- > 0;) {
    loops.attend(step.p, plan.tiles[i], scratch.data());
  }
  for (const Tile& tile : plan.merges) loops.merge(step.p, tile);
  return std::memcmp(whole.data(), step.out.data(), whole.size() * sizeof(float)) == 0;
}

double number(const Step& step, int64_t slot, int64_t kv_head, int64_t half, int64_t h) {
  const Cache& cache = step.p.cache;
  return step.numbers[static_cast<size_t>(
      ((slot * cache.num_kv_heads + kv_head) * 2 + half) * cache.head_dim + h)];
}

float as_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

// Whether a row's products are of bfloat16 numbers: as in cpu_bfloat16.cc and cpu_plan.h.
bool is_rounded(const Step& step, const Loops& loops, int64_t row, int64_t token) {
  if (&loops != find_attention("amx") || step.p.cache.type != Elements::kBfloat16) return false;
  if (step.p.cache.head_dim % 32 == 0) return true;
  const int64_t heads = step.p.num_heads / step.p.cache.num_kv_heads;
  const int64_t most = std::max<int64_t>(tile_rows(loops, step.p.cache) / heads, 1);
  const int64_t end = step.cu_q_lens[static_cast<size_t>(row) + 1];
  const int64_t done = token - step.cu_q_lens[static_cast<size_t>(row)];
  return std::min(most, end - (token - done % most)) * heads > kFewRows;
}

bool is_right(const Step& step, const Loops& loops, int64_t row, int64_t token, int64_t head) {
  const Attention& p = step.p;
  const int64_t size = p.cache.head_dim, at = (token * p.num_heads + head) * size;
  const int64_t kv_head = head / (p.num_heads / p.cache.num_kv_heads);
  const size_t r = static_cast<size_t>(row);
  const int64_t position = step.kv_lens[r] - (step.cu_q_lens[r + 1] - token);
  const bool rounds = is_rounded(step, loops, row, token);
  // Of rounded weights each is off by 2^-9 of itself, and values are up to 4 apart.
  const double bound = rounds ? 0x1p-7 : 3e-5;
  std::vector<double> wanted(static_cast<size_t>(size));
  double total = 0;
  for (int64_t key = std::max<int64_t>(position - p.window + 1, 0); key <= position; ++key) {
    const int64_t slot = slot_of(step, row, key);
    double score = 0;
    for (int64_t h = 0; h < size; ++h) {
      const float query = p.scale * step.q[static_cast<size_t>(at + h)];
      score += (rounds ? as_bfloat16(query) : query) * number(step, slot, kv_head, 0, h);
    }
    if (p.soft_cap > 0) score = p.soft_cap * std::tanh(score / p.soft_cap);
    const double weight = std::exp(score);
    total += weight;
    for (int64_t h = 0; h < size; ++h) {
      wanted[static_cast<size_t>(h)] += weight * number(step, slot, kv_head, 1, h);
    }
  }
  for (int64_t h = 0; h < size; ++h) {
    const double error = std::fabs(step.out[static_cast<size_t>(at + h)] -
                                   wanted[static_cast<size_t>(h)] / total);
    if (!(error < bound)) {
      std::fprintf(stderr, "type %d head_dim %d: off by %g\n", static_cast<int>(p.cache.type),
                   static_cast<int>(size), error);
      return false;
    }
  }
  return true;
}

bool run_and_check(Random& random, const Loops& loops, bool threads) {
  Step step;
  make(random, step);
  loops.write({step.p.cache, step.new_kv.data(), step.slots.data(),
               static_cast<int64_t>(step.slots.size())});
  attend(step, loops, threads);
  if (!is_the_same_in_parts(step, loops)) {
    std::fprintf(stderr, "other bits in parts\n");
    return false;
  }
  for (int64_t row = 0; row < step.rows.num_rows; ++row) {
    const int64_t end = step.cu_q_lens[static_cast<size_t>(row) + 1];
    for (int64_t token = step.cu_q_lens[static_cast<size_t>(row)]; token < end;
         token += 1 + random.below(9)) {
      const int64_t head = random.below(static_cast<int>(step.p.num_heads));
      if (!is_right(step, loops, row, token, head)) {
        return false;
      }
    }
  }
  const size_t live = static_cast<size_t>(step.cu_q_lens.back() * step.p.num_heads *
                                          step.p.cache.head_dim);
  for (size_t i = live; i < step.out.size(); ++i) {
    if (step.out[i] != 0) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const bool threads = std::string(argv[3]) == "threads";
  for (int i = threads ? 4 : 3; i < argc; ++i) {
    Random random(static_cast<unsigned>(std::atoi(argv[1])));
    const Loops* loops = find_attention(argv[i]);
    if (loops == nullptr) return 2;
    for (int call = 0; call < std::atoi(argv[2]); ++call) {
      if (!run_and_check(random, *loops, threads)) return 1;
    }
  }
  std::puts("ok");
  return 0;
}
