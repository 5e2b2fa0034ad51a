#include "distrain/collective/pass_number.h"

#include <tuple>

#include <fmt/format.h>

namespace distrain::collective {

bool PassNumber::agrees_with(const PassNumber& other) const {
  if (step != 0 && other.step != 0 && step != other.step) return false;
  if (forward == 0 || other.forward == 0) return true;
  if ((context == 0) != (other.context == 0)) return true;  // not comparable: separate counts
  if (again != other.again) return false;
  return forward == other.forward || (context != 0 && context == other.context);
}

std::string PassNumber::text() const {
  std::string text = "the backward pass";
  if (forward != 0) text += " of forward " + std::to_string(forward);
  if (again != 0) text += " (its number " + std::to_string(again + 1) + ")";
  if (step != 0) text += " in step " + std::to_string(step);
  return text;
}

std::optional<base::Error> pass_error(const RankInPass& a, const RankInPass& b) {
  if (a.pass.agrees_with(b.pass)) return std::nullopt;
  const auto position = [](const PassNumber& of) {
    return std::tie(of.step, of.forward, of.again);
  };
  const RankInPass& ahead = position(a.pass) > position(b.pass) ? a : b;
  const RankInPass& behind = &ahead == &a ? b : a;
  return base::Error{base::ErrorKind::kInvalid,
                     fmt::format("rank {0} is in {1}, rank {2} in {3}: rank {0} has left out a "
                                 "backward pass, or made a forward() more",
                                 ahead.rank, ahead.pass.text(), behind.rank, behind.pass.text()),
                     ahead.rank};
}

}  // namespace distrain::collective
