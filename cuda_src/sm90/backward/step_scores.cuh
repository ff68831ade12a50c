// This header turns a step's products into weights and gradients of scores, in Hopper's backward kernel of narrow
// heads.
#include "loader.cuh"
#include "options.cuh"

// ADDS_SLOPES_EARLY: a step's terms of the slopes' gradient are added before its products start. They are added while
// products run where the order of additions leaves registers for that.
constexpr bool ADDS_SLOPES_EARLY = DETERMINISTIC;

// EarlyDraws are the random bits that are drawn while products are computed.
struct EarlyDraws : GradientFragment::Random<EARLY_DRAWS> {
  DEVICE explicit EarlyDraws(const GradientFragment& scores) { scores.draw_ahead<HOLDS_DRAWS>(*this); }
};

// StepScores has what a warpgroup needs to know of a step's scores. It is made while their products are computed.
struct StepScores {
  const AttentionParams& p;
  const Step& step;
  const int warpgroup;
  const GradientFragment scores;
  bool masked;
  const bool last;  // this is the warpgroup's last step
  const LseValues<> lse;
  EarlyDraws random;
  const BlockBits bits;
  const MaskBits mask;
  FewDerivatives derivatives;

  DEVICE StepScores(const AttentionParams& p, const Step& step, const KeyWork& work, const float* lse, int warpgroup,
                    int first_key, float scale)
      : p(p),
        step(step),
        warpgroup(warpgroup),
        scores(p, work.sequence, step.head, step.first_row, first_key + warp_row(), scale),
        masked(step.masked >> warpgroup & 1),
        last(step.last >> warpgroup & 1),
        lse(lse),
        random(scores),
        bits(p, step.slots, warpgroup, masked),
        mask(p, work.sequence, step.head, step.first_row, first_key + warp_row()),
        derivatives(nullptr) {}

  // find_weights() turns S^T (`x`) into P^T, with the sign set where dropout drops; a bias is in the panel.
  DEVICE void find_weights(float (&x)[FRAGMENT], u32 panel) {
    derivatives.take(x, scores);
    if constexpr (HAS_BIAS_TILES) masked |= add_bias(x, scores, panel);
    to_weights(x, scores, lse, masked, bits);
    if constexpr (MASK_IN_BITS) {
      mask.clear_hidden(x);
      masked = true;
    }
    GradientFragment same = scores;
    // Without this branch the draws that are not made ahead would be made early, too.
    if constexpr (HAS_DROPOUT && EARLY_DRAWS < EarlyDraws::GROUPS) {
      u32 first_row = step.first_row;
      ptx::forget(first_row);
      same.row = first_row + fragment_column();
    }
    same.mark_dropped(x, random);
    keep(x);
  }

  // find_gradients() turns dP^T (`dp`) into dS^T, and gives what it adds to the slopes' gradient.
  DEVICE float find_gradients(float (&dp)[FRAGMENT], const float (&weights)[FRAGMENT], const QueryValues& delta) {
#pragma unroll
    for (int e = 0; e < FRAGMENT; e++) dp[e] = score_gradient<!WRITES_DBIAS>(p, dp[e], weights[e], delta[e]);
    if (masked || HIDES_BY_RULE) clear_hidden(dp, weights);
    derivatives.differentiate_rule(dp);
    const float dslope = slope_terms(scores, dp);
    if (ADDS_SLOPES_EARLY) step.add(p, warpgroup, dslope);
    derivatives.differentiate_cap(dp, weights, lse, scores);
    return dslope;
  }
};
