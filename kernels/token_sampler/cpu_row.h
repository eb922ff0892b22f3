// One row of logits: shaped, then a token chosen. See the contract, xla.py.
//
// A token without weight is never drawn, and a filter keeps no token without those above it: what
// is certain to be left out is not looked at, block by block.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "cpu_sampler.h"

namespace jaxinfer {

// The columns of rows.py.
enum RealColumn { kTemperature, kTopP, kMinP, kRepetition, kPresence, kFrequency, kNumReals };
enum IntegerColumn { kTopK, kSeedLow, kSeedHigh, kMinLength, kHasBias, kHasPenalties, kNumIntegers };

struct LogitRow {
  const float* logits;
  int64_t vocab_size;
  int32_t best;  // of the largest logits the lowest id
  const float* reals;
  const int32_t* integers;
  const int32_t* stop_ids;
  int64_t num_stops;
  const int32_t* bias_ids;
  const float* bias_values;
  int64_t num_biases;
  const int16_t* counts;
  int32_t length;
  const uint32_t* mask;  // null where it restricts nothing

  bool is_short() const { return length < integers[kMinLength]; }
  bool is_shaped() const {
    return integers[kHasBias] || integers[kHasPenalties] || is_short() || mask != nullptr;
  }
  bool is_plain() const { return reals[kTemperature] == 0 && !is_shaped(); }
};

// Whether any of `count` tokens is banned.
inline bool restricts(const uint32_t* mask, int64_t count) {
  const int64_t whole = count / 32;
  for (int64_t word = 0; word < whole; ++word) {
    if (mask[word] != ~uint32_t{0}) return true;
  }
  const uint32_t rest = (uint32_t{1} << count % 32) - 1;
  return rest != 0 && (mask[whole] & rest) != rest;
}

// In [0, 1), 24 bits: `uniform` of xla.py.
inline double uniform(const LogitRow& row) {
  const auto mix = [](uint32_t x) {
    x = (x ^ x >> 16) * 0x85EBCA6B;
    x = (x ^ x >> 13) * 0xC2B2AE35;
    return x ^ x >> 16;
  };
  uint32_t bits = 0x9E3779B9;
  for (int32_t word : {row.integers[kSeedLow], row.integers[kSeedHigh], row.length}) {
    bits = mix(bits ^ static_cast<uint32_t>(word)) + 0x9E3779B9;
  }
  return static_cast<double>(mix(bits) >> 8) * 0x1p-24;
}

// A token that filters may keep. `depth` is its scaled logit, which is at most 0, without its sign:
// the order of depths is the reverse of that of logits.
struct Candidate {
  int32_t id;
  uint32_t depth;
  float weight;
};

class RowSampler {
 public:
  RowSampler(const LogitRow& row, const SamplerLoops& loops)
      : row_(row), loops_(loops), kept_(Kept::of_thread()), logits_(row.logits) {}

  int32_t choose() {
    if (row_.is_plain()) return row_.best;
    if (row_.is_shaped()) shape();
    largest_ = at_least(kept_.largest, num_blocks());
    loops_.find_largest(logits_, row_.vocab_size, largest_);
    const float* const block = std::max_element(largest_, largest_ + num_blocks());
    scale_ = {*block, row_.reals[kTemperature]};
    if (!std::isfinite(scale_.top)) return row_.best;
    const float* const from = logits_ + (block - largest_) * kBlock;
    best_ = static_cast<int32_t>(std::find(from, logits_ + row_.vocab_size, scale_.top) - logits_);
    return scale_.temperature == 0 ? best_ : draw();
  }

 private:
  // Memory that lasts as its thread.
  struct Kept {
    std::vector<float> logits, largest, ranked, sums;
    std::vector<Candidate> candidates, group;

    static Kept& of_thread() {
      thread_local Kept kept;
      return kept;
    }
  };

  static float* at_least(std::vector<float>& floats, int64_t count) {
    if (static_cast<int64_t>(floats.size()) < count) floats.resize(static_cast<size_t>(count));
    return floats.data();
  }
  int64_t num_blocks() const { return (row_.vocab_size + kBlock - 1) / kBlock; }
  int64_t block_size(int64_t block) const {
    return std::min(kBlock, row_.vocab_size - block * kBlock);
  }
  float scaled(float logit) const { return (logit - scale_.top) / scale_.temperature; }
  bool has(int32_t id) const { return id >= 0 && id < row_.vocab_size; }

  void shape() {
    float* const shaped = at_least(kept_.logits, row_.vocab_size);
    std::memcpy(shaped, logits_, static_cast<size_t>(row_.vocab_size) * sizeof(float));
    logits_ = shaped;
    for (int64_t i = 0; row_.integers[kHasBias] && i < row_.num_biases; ++i) {
      if (has(row_.bias_ids[i])) shaped[row_.bias_ids[i]] += row_.bias_values[i];
    }
    if (row_.integers[kHasPenalties]) {
      const float* const reals = row_.reals;
      loops_.penalize(shaped, row_.counts, row_.vocab_size,
                      {reals[kRepetition], reals[kPresence], reals[kFrequency]});
    }
    for (int64_t i = 0; row_.is_short() && i < row_.num_stops; ++i) {
      if (has(row_.stop_ids[i])) shaped[row_.stop_ids[i]] = kBanned;
    }
    if (row_.mask != nullptr) loops_.mask(shaped, row_.mask, row_.vocab_size);
  }

  int32_t draw() {
    const bool has_top_k = row_.integers[kTopK] > 0 && row_.integers[kTopK] < row_.vocab_size;
    const double top_p = row_.reals[kTopP];
    const float min_p = row_.reals[kMinP];
    const double total = has_top_k || (top_p >= 1 && min_p > 0) ? 0 : sum_all();
    if (!has_top_k && top_p >= 1 && min_p <= 0) return draw_of_all(total);
    float bound = -std::numeric_limits<float>::infinity();
    if (has_top_k) bound = top_k_bound();
    // A little lower than rounding could make it.
    if (top_p >= 1 && min_p > 0) bound = std::max(bound, std::log(min_p) - 0.01f);
    if (!has_top_k && top_p < 1) {
      // All tokens with less weight together are less than what top-p leaves out.
      const double least = (1 - top_p) * total / static_cast<double>(row_.vocab_size);
      bound = std::max(bound, static_cast<float>(std::log(least)) - 0.01f);
    }
    collect(bound);
    if (has_top_k) keep_until(row_.integers[kTopK], [](const Candidate&) { return 1.0; });
    if (top_p < 1) {
      const double of = has_top_k ? sum_candidates() : total;
      keep_until(top_p * of, [](const Candidate& candidate) { return candidate.weight; });
    }
    erase(kept_.candidates, [&](const Candidate& candidate) { return candidate.weight < min_p; });
    const double mass = uniform(row_) * sum_candidates();
    double passed = 0;
    for (const Candidate& candidate : kept_.candidates) {
      passed += candidate.weight;
      if (passed > mass) return candidate.id;
    }
    return best_;
  }

  // The sum of all weights; those of the blocks are kept.
  double sum_all() {
    sums_ = at_least(kept_.sums, num_blocks());
    loops_.sum_weights(logits_, row_.vocab_size, scale_, sums_);
    double total = 0;
    for (int64_t block = 0; block < num_blocks(); ++block) total += sums_[block];
    return total;
  }

  int32_t draw_of_all(double total) const {
    const double mass = uniform(row_) * total;
    double passed = 0;
    for (int64_t block = 0; block < num_blocks(); ++block) {
      if (!(passed + sums_[block] > mass)) {
        passed += sums_[block];
        continue;
      }
      float scaled[kBlock], weights[kBlock];
      loops_.weigh(logits_ + block * kBlock, block_size(block), scale_, scaled, weights);
      // By rounding the last one with a weight may not get past the mass, as its block does.
      int64_t found = 0;
      for (int64_t i = 0; i < block_size(block) && !(passed > mass); ++i) {
        if (weights[i] > 0) found = i;
        passed += weights[i];
      }
      return static_cast<int32_t>(block * kBlock + found);
    }
    return best_;
  }

  // A scaled logit that at least top-k tokens reach: as many blocks have one.
  float top_k_bound() {
    const int64_t top_k = row_.integers[kTopK];
    if (top_k > num_blocks()) return -std::numeric_limits<float>::infinity();
    float* const ranked = at_least(kept_.ranked, num_blocks());
    std::copy_n(largest_, num_blocks(), ranked);
    std::nth_element(ranked, ranked + top_k - 1, ranked + num_blocks(), std::greater<float>());
    return scaled(ranked[top_k - 1]);
  }

  // Candidates, in the order of the vocabulary: those with a weight that reach the bound.
  void collect(float bound) {
    kept_.candidates.clear();
    for (int64_t block = 0; block < num_blocks(); ++block) {
      if (scaled(largest_[block]) < bound) continue;
      float scaled[kBlock], weights[kBlock];
      loops_.weigh(logits_ + block * kBlock, block_size(block), scale_, scaled, weights);
      for (int64_t i = 0; i < block_size(block); ++i) {
        if (!(scaled[i] >= bound) || !(weights[i] > 0)) continue;
        uint32_t bits;
        std::memcpy(&bits, scaled + i, sizeof(bits));
        const auto id = static_cast<int32_t>(block * kBlock + i);
        kept_.candidates.push_back({id, bits & 0x7fffffff, weights[i]});
      }
    }
  }

  double sum_candidates() const {
    double total = 0;
    for (const Candidate& candidate : kept_.candidates) total += candidate.weight;
    return total;
  }

  template <class Predicate>
  static void erase(std::vector<Candidate>& from, const Predicate& is_erased) {
    from.erase(std::remove_if(from.begin(), from.end(), is_erased), from.end());
  }

  // Keeps the fewest of the best candidates, and ties with the last, that weigh `wanted` together.
  // Finds the last one's depth from its first bits to its last, by the masses of those that begin
  // alike.
  template <class Weight>
  void keep_until(double wanted, const Weight& weight) {
    double masses[1 << kFirstBits];
    std::vector<Candidate>& group = kept_.group;
    group = kept_.candidates;
    uint32_t deepest = 0;
    double passed = 0;
    for (int shift = 31 - kFirstBits; shift >= 0; shift -= kNextBits) {
      const uint32_t last = (1 << (shift == 31 - kFirstBits ? kFirstBits : kNextBits)) - 1;
      std::fill_n(masses, last + 1, 0.0);
      for (const Candidate& candidate : group) {
        masses[candidate.depth >> shift & last] += weight(candidate);
      }
      uint32_t digit = 0;
      for (; digit < last && passed + masses[digit] < wanted; ++digit) passed += masses[digit];
      deepest |= digit << shift;
      erase(group, [&](const Candidate& candidate) {
        return (candidate.depth >> shift & last) != digit;
      });
    }
    erase(kept_.candidates, [&](const Candidate& candidate) { return candidate.depth > deepest; });
  }

  static constexpr int kFirstBits = 11, kNextBits = 10;  // of a depth's 31

  const LogitRow& row_;
  const SamplerLoops& loops_;
  Kept& kept_;
  const float* logits_;
  float* largest_ = nullptr;
  float* sums_ = nullptr;
  Scale scale_{};
  int32_t best_ = 0;
};

}  // namespace jaxinfer
