"""Prints tests/unit/scenario/cart_pole_trajectories.h: episodes of Gymnasium's CartPole-v1."""
import gymnasium
import numpy as np


def balance(state, random):
    """Returns the action of a linear controller that balances the pole."""
    return int(state @ np.array([0.3, 0.6, 6.0, 1.5]) > 0)


def shaky(state, random):
    return balance(state, random) if random.random() < 0.4 else int(random.integers(2))


def drift(state, random):
    """Returns actions that balance the pole but drift off the track to the right."""
    return int(state @ np.array([0.0, 0.0, 6.0, 1.5]) > 0.3)


POLICIES = {
    "balancing": balance,
    "shaky": shaky,
    "drifting": drift,
    "random": lambda state, random: int(random.integers(2)),
    "left": lambda state, random: 0,
    "right": lambda state, random: 1,
}


def trajectory(policy, seed):
    env = gymnasium.make("CartPole-v1")
    random = np.random.default_rng(seed)
    env.reset(seed=seed)
    initial = env.unwrapped.state.copy()
    actions, steps, ended = [], [], False
    while not ended:
        action = policy(env.unwrapped.state, random)
        observation, reward, terminated, truncated, _ = env.step(action)
        actions.append(action)
        steps.append((observation, reward, terminated, truncated))
        ended = terminated or truncated
    return initial, "".join(map(str, actions)), steps


HEADER = """\
// Recorded from Gymnasium's CartPole-v1 by tests/python/cart_pole.py: do not edit.
#pragma once

#include <array>
#include <string_view>
#include <vector>

namespace distrain::testing {

struct CartPoleTrajectory {
  std::string_view policy;
  std::array<double, 4> initial;                   ///< state
  std::string_view actions;                        ///< one character a step
  bool terminated, truncated;                      ///< by the last step
  double reward;                                   ///< of all steps
  std::vector<std::array<float, 4>> observations;  ///< after each step
};

// clang-format off
inline const std::vector<CartPoleTrajectory> kCartPoleTrajectories = {"""


def record():
    print(HEADER)
    for number, (name, policy) in enumerate(POLICIES.items()):
        initial, actions, steps = trajectory(policy, 100 + number)
        last = steps[-1]
        flags = f"{str(last[2]).lower()}, {str(last[3]).lower()}, {sum(step[1] for step in steps)!r}"
        print(f'{{"{name}", {{{", ".join(repr(float(x)) for x in initial)}}},')
        for start in range(0, len(actions), 90):
            print(f'"{actions[start:start + 90]}"')
        print(f", {flags}, {{")
        rows = [f"{{{', '.join(f'{x:.7f}f' for x in observation)}}}," for observation, *_ in steps]
        for start in range(0, len(rows), 2):
            print(" ".join(rows[start:start + 2]))
        print("}},")
    print("};\n// clang-format on\n\n}  // namespace distrain::testing")


record()
