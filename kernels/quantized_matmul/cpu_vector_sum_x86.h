// The sum of sixteen lanes: halves are added until one is left. See cpu_vector.h.
#pragma once

namespace {

inline float sum(Lanes lanes) {
  const __m128 four = fold_to_4(lanes);
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// Four sums at once, each added up as `sum` does.
inline void sum_4(const Lanes* lanes, float* to, bool add_to) {
  const __m128 a = fold_to_4(lanes[0]), b = fold_to_4(lanes[1]);
  const __m128 c = fold_to_4(lanes[2]), d = fold_to_4(lanes[3]);
  const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
  const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
  const __m128 sums = _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
  _mm_storeu_ps(to, add_to ? _mm_add_ps(_mm_loadu_ps(to), sums) : sums);
}

}  // namespace
