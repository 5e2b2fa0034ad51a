// Tests that a wrong value of an option that every job has gives exit code 2 and one clear error.
#include <string>
#include <vector>

#include "../cmd/jobs.h"
#include "support/catch.h"
#include "support/refusal.h"
#include "support/scenario_data.h"

using namespace distrain;
using namespace distrain::testing;

namespace {

// Invalid checkpoint and fault options, which every job has, each with a part of its error.
const std::vector<Refused> kOfEveryJob = {
    {{"--checkpoint-every", "5"}, "--checkpoint-every needs --checkpoint"},
    {{"--resume", "auto"}, "--resume auto needs --checkpoint"},
    {{"--checkpoint"}, "--checkpoint needs a value"},
    {{"--inject", "slow=1"}, "unknown fault 'slow'"},
    {{"--inject", "delay"}, "--inject delay: a fault has the form KIND=VALUE"},
    {{"--inject", "delay=1s,"}, "--inject : a fault has the form KIND=VALUE"},
    {{"--inject", "delay=50q"}, "such as 60, 50ms, 5m or 2h, not '50q'"},
    {{"--inject", "delay=0ms"}, "the delay must be a time above 0"},
    {{"--inject", "delay=xms"}, "the delay must be a time above 0 and up to 1000000 s"},
    {{"--inject", "delay=1ms@rank=4"}, "--inject delay=1ms@rank=4: there is no rank 4"},
    {{"--inject", "delay=1ms@rank=x"}, "the rank must be a whole number"},
    {{"--inject", "delay=1ms@2"}, "@ must be followed by rank=N"},
    {{"--inject", "fail=save.1"}, "must be checkpoint.N, not 'save.1'"},
    {{"--inject", "fail=checkpoint.0"}, "what fails must be a whole number from 1"},
    {{"--inject", "delay=1ms,fail=checkpoint.1@rank=1"}, "only rank 0 saves"},
    {{"--inject", "save=1ms@rank=1"}, "only rank 0 saves"},
};

}  // namespace

TEST_CASE("wrong options that every job has are refused by name") {
  const Folder folder;
  check_all_refused(app::JobCommand(cmd::hybrid_job()), kOfEveryJob);
  check_all_refused(app::JobCommand(cmd::rnn_job()), kOfEveryJob);
  for (Refused line : kOfEveryJob) {
    line.arguments.insert(line.arguments.begin(), {"--data", folder.path()});
    check_refused(app::JobCommand(cmd::ps_job()), line.arguments, line.told);
  }
}

TEST_CASE("invalid devices are refused") {
  const app::JobCommand hybrid(cmd::hybrid_job());
  for (const char* word : {"nonsense", "cuda:x", "cuda:-1", "trainer", "trainer=gpu", "nobody=cuda",
                           "master=cuda,master=cpu"}) {
    check_refused(hybrid, {"--device", word}, "--device");
  }
  check_refused(hybrid, {"--device="}, "--device needs a value");
  check_refused(hybrid, {"--device", "trainer=cuda", "--local"}, "--local is one process");
  check_refused(app::JobCommand(cmd::pipeline_job()), {"--device", "stage3=cuda"}, "worker3");
  check_refused(app::JobCommand(cmd::rl_job()), {"--device", "observer=cuda"}, "computes nothing");

  const app::JobCommand ps(cmd::ps_job());
  const Folder folder;
  write_images(folder, 64, 16, 1);
  const auto refused = [&](Words arguments, const std::string& told) {
    arguments.insert(arguments.begin(), {"--data", folder.path()});
    check_refused(ps, arguments, told);
  };
  refused({"--num-gpus", "1", "--device", "cpu"}, "different devices");
  refused({"--num-gpus", "0", "--device", "cuda"}, "different devices");
  refused({"--num-gpus", "1", "--device", "cuda:1"}, "different devices");
  refused({"--num-gpus", "2", "--device", "server=cuda:0"}, "different devices");
  refused({"--num-gpus", "2", "--device", "server=cpu"}, "different devices");
  refused({"--num-gpus", "3"}, "from 0 to 2");
}
