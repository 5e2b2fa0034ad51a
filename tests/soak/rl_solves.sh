#!/bin/bash
# ctest: timeout=1200
# With each of these seeds CartPole is solved by one observer within 3000 episodes and by three within 1000.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
source "$(dirname "$0")/../cli/lib.bash"

limit=200
while read -r observers episodes; do
  for seed in 1 2 3 4 5; do
    name="$observers observers, seed $seed"
    run rl --observers "$observers" --seed "$seed" --max-episodes "$episodes" --log-interval 0
    expect 0 "$name"
    expect_jq ".[-1] | .event == \"end\" and .solved == true and .running_reward > 475
      and .episodes <= $episodes and .live_rrefs == 0" "$name"
    jq -c 'select(.event == "end") | {episodes, running_reward, env_steps_per_s, wall_s}' "$tmp/out"
  done
done <<<"1 3000
3 1000"
finish
