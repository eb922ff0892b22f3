// Chooses tokens for random rows of logits that ask for random things, on buffers without a byte to
// spare, once on one thread and once on four: the same tokens, and none that is banned. Built with
// sanitizers by test_native_build.py; what the tokens should be is tested in Python.
//
// usage: native_sanitize_sampler SEED CALLS INSTRUCTION_SET...; `threads` may be the first set.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "../cpp/parallel.h"
#include "../token_sampler/cpu_row.h"
#include "native_sanitize.h"

namespace {

using namespace jaxinfer;

struct Row {
  std::vector<float> logits, reals, bias_values;
  std::vector<int32_t> integers, stop_ids, bias_ids;
  std::vector<int16_t> counts;
  std::vector<uint32_t> mask;
  int32_t best = 0;

  int64_t vocab_size() const { return static_cast<int64_t>(logits.size()); }
  bool allows(int32_t id) const {
    return mask.empty() || (mask[static_cast<size_t>(id) / 32] >> id % 32 & 1);
  }
  LogitRow view() const {
    const bool is_masked = !mask.empty() && restricts(mask.data(), vocab_size());
    return {logits.data(),
            vocab_size(),
            best,
            reals.data(),
            integers.data(),
            stop_ids.data(),
            static_cast<int64_t>(stop_ids.size()),
            bias_ids.data(),
            bias_values.data(),
            static_cast<int64_t>(bias_ids.size()),
            counts.data(),
            5,
            is_masked ? mask.data() : nullptr};
  }
};

Row make_row(Random& random, int vocab_size) {
  Row row;
  const bool has_bad = random.below(6) == 0, has_ties = random.below(3) == 0;
  for (int id = 0; id < vocab_size; ++id) {
    const float bad[] = {NAN, INFINITY, -INFINITY, kBanned};
    const float value = 8 * random.uniform();
    row.logits.push_back(has_bad && random.below(20) == 0 ? bad[random.below(4)]
                         : has_ties                       ? std::round(value)
                                                          : value);
    row.counts.push_back(static_cast<int16_t>(random.below(3) ? 0 : random.below(32768)));
    if (row.logits[row.best] < row.logits.back()) row.best = id;
  }
  const float temperatures[] = {0.0f, 1e-5f, 0.7f, 2.0f, 1000.0f};
  const float top_ps[] = {0.0f, 0.5f, 0.95f, 1.0f, 1.0f}, min_ps[] = {0.0f, 0.0f, 0.1f, 1.0f};
  row.reals = {temperatures[random.below(5)], top_ps[random.below(5)], min_ps[random.below(4)],
               1.3f, 0.5f, random.uniform()};
  const int top_ks[] = {0, 1, 5, 50, std::numeric_limits<int32_t>::max()};
  row.integers = {random.one_of(top_ks), random.below(1 << 30), random.below(1 << 30),
                  random.below(8), random.below(2), random.below(2)};
  for (int i = 0; i < 5; ++i) {
    row.stop_ids.push_back(random.below(vocab_size + 3) - 1);
    row.bias_ids.push_back(random.below(vocab_size + 1));
    row.bias_values.push_back(100 * random.uniform());
  }
  if (random.below(2)) {
    const int density = random.below(4);
    for (int word = 0; word < (vocab_size + 31) / 32; ++word) {
      uint32_t bits = density == 3 ? ~uint32_t{0} : 0;
      for (int bit = 0; bit < 32 * density && density < 3; ++bit) bits |= 1u << random.below(32);
      row.mask.push_back(bits);
    }
  }
  return row;
}

std::vector<int32_t> choose(const std::vector<Row>& rows, const SamplerLoops& loops,
                            int64_t num_threads) {
  std::vector<int32_t> tokens(rows.size());
  Pool pool;
  run_chunks(pool, num_threads, static_cast<int64_t>(rows.size()), [&](int64_t i) {
    const LogitRow row = rows[static_cast<size_t>(i)].view();
    tokens[static_cast<size_t>(i)] = RowSampler(row, loops).choose();
  });
  return tokens;
}

bool is_right(const Row& row, int32_t token) {
  if (token < 0 || token >= row.vocab_size()) return false;
  bool is_finite = true, allows_any = false;
  for (int32_t id = 0; id < row.vocab_size(); ++id) {
    is_finite &= std::isfinite(row.logits[static_cast<size_t>(id)]);
    allows_any |= row.allows(id);
  }
  return !is_finite || !allows_any || row.allows(token) || row.view().is_short();
}

const SamplerLoops* find(const std::string& name) {
  if (name == "portable") return &sampler_loops_portable;
#if defined(__x86_64__)
  if (name == "avx2") return &sampler_loops_avx2;
  if (name == "avx512" || name == "avx512bf16" || name == "amx") return &sampler_loops_avx512;
#endif
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  for (int i = std::string(argv[3]) == "threads" ? 4 : 3; i < argc; ++i) {
    Random random(static_cast<unsigned>(std::atoi(argv[1])));
    const SamplerLoops* const loops = find(argv[i]);
    if (loops == nullptr) return 2;
    for (int call = 0; call < std::atoi(argv[2]); ++call) {
      const int vocab_size = 1 + random.below(random.below(3) ? 200 : 3000);
      std::vector<Row> rows;
      for (int count = 1 + random.below(9); count > 0; --count) {
        rows.push_back(make_row(random, vocab_size));
      }
      const std::vector<int32_t> alone = choose(rows, *loops, 1);
      bool is_fine = alone == choose(rows, *loops, 4);
      for (size_t row = 0; row < rows.size(); ++row) is_fine &= is_right(rows[row], alone[row]);
      if (is_fine) continue;
      std::fprintf(stderr, "%s: call %d of %d logits is wrong\n", argv[i], call, vocab_size);
      return 1;
    }
  }
  std::puts("ok");
  return 0;
}
