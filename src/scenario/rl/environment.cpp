#include "environment.h"

#include <cmath>
#include <numbers>

#include "distrain/base/error.h"
#include "distrain/base/trace.h"

namespace distrain::scenario {

namespace {

constexpr double kGravity = 9.8;
constexpr double kCartMass = 1.0;
constexpr double kPoleMass = 0.1;
constexpr double kTotalMass = kPoleMass + kCartMass;
constexpr double kLength = 0.5;  // half of the pole's length in m
constexpr double kPoleMassLength = kPoleMass * kLength;
constexpr double kForce = 10.0;
constexpr double kStep = 0.02;  // s
constexpr double kAngleLimit = 12 * 2 * std::numbers::pi / 360;
constexpr double kTrackLimit = 2.4;
constexpr double kResetRange = 0.05;
constexpr int kMaxSteps = 500;

}  // namespace

Observation CartPole::reset(base::Random random) {
  State state;
  for (double& x : state) x = -kResetRange + 2 * kResetRange * random.unit();
  return begin(state);
}

CartPole::Step CartPole::step(int action) {
  auto& [x, x_speed, angle, angle_speed] = state_;
  const double force = action == 1 ? kForce : -kForce;
  const double cos = std::cos(angle);
  const double sin = std::sin(angle);
  const double push = (force + kPoleMassLength * (angle_speed * angle_speed) * sin) / kTotalMass;
  const double angle_change = (kGravity * sin - cos * push) /
                              (kLength * (4.0 / 3.0 - kPoleMass * (cos * cos) / kTotalMass));
  const double x_change = push - kPoleMassLength * angle_change * cos / kTotalMass;
  x = x + kStep * x_speed;
  x_speed = x_speed + kStep * x_change;
  angle = angle + kStep * angle_speed;
  angle_speed = angle_speed + kStep * angle_change;
  ++steps_;

  const bool fallen = std::abs(x) > kTrackLimit || std::abs(angle) > kAngleLimit;
  return {observation(), 1, fallen, steps_ >= kMaxSteps};
}

EnvironmentStates Environments::play(
    int64_t episode, const std::function<Actions(const EnvironmentStates&)>& select) {
  EnvironmentStates running, over;
  for (uint32_t e = 0; e < environments_.size(); ++e) {
    const base::Random random({seed_, e, static_cast<uint64_t>(episode)});
    running.push_back({e, environments_[e].reset(random), 0});
  }
  for (int64_t step = 1; !running.empty(); ++step) {
    const Actions actions = select(running);
    if (actions.size() != running.size()) {
      throw base::Exception(base::ErrorKind::kProtocol,
                            "the agent gave " + std::to_string(actions.size()) + " actions for " +
                                std::to_string(running.size()));
    }
    const base::TraceScope scope("environment", "step", step);
    EnvironmentStates left;
    for (size_t i = 0; i < actions.size(); ++i) {
      const uint32_t e = running[i].environment;
      const CartPole::Step result = environments_[e].step(actions[i]);
      const bool ends = result.over() || step == max_steps_;
      (ends ? over : left).push_back({e, result.observation, result.reward});
    }
    running = std::move(left);
  }
  return over;
}

}  // namespace distrain::scenario
