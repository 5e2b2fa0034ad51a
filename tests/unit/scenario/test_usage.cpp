// Tests wrong usage: exit code 2 and one clear error, for both spellings of options.
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include <unistd.h>

#include "../cmd/jobs.h"
#include "refusal.h"
#include "support/catch.h"
#include "support/scenario_data.h"

using namespace distrain;
using namespace distrain::testing;

namespace {

using Words = std::vector<std::string>;

struct Wrong {
  Words arguments;
  std::string told;
};

void check_all_refused(const app::JobCommand& command, const std::vector<Wrong>& all) {
  for (const Wrong& wrong : all) check_refused(command, wrong.arguments, wrong.told);
}

// Checkpoint and fault-tolerance options, which every job has.
const std::vector<Wrong> kOfEveryJob = {
    {{"--checkpoint-every", "5"}, "--checkpoint-every needs --checkpoint"},
    {{"--resume", "auto"}, "--resume auto needs --checkpoint"},
    {{"--checkpoint"}, "--checkpoint needs a value"},
    {{"--inject", "slow=1"}, "unknown fault 'slow'"},
    {{"--inject", "delay"}, "--inject delay: a fault has the form KIND=VALUE"},
    {{"--inject", "delay=1s,"}, "--inject : a fault has the form KIND=VALUE"},
    {{"--inject", "delay=50"}, "in us, ms or s (50ms), not '50'"},
    {{"--inject", "delay=0ms"}, "the delay must be a number above 0"},
    {{"--inject", "delay=xms"}, "the delay must be a number above 0 and up to 1000000, not 'x'"},
    {{"--inject", "delay=1ms@rank=4"}, "--inject delay=1ms@rank=4: there is no rank 4"},
    {{"--inject", "delay=1ms@rank=x"}, "the rank must be a whole number"},
    {{"--inject", "delay=1ms@2"}, "@ must be followed by rank=N"},
    {{"--inject", "fail=save.1"}, "must be checkpoint.N, not 'save.1'"},
    {{"--inject", "fail=checkpoint.0"}, "what fails must be a whole number from 1"},
    {{"--inject", "delay=1ms,fail=checkpoint.1@rank=1"}, "only rank 0 saves"},
    {{"--inject", "save=1ms@rank=1"}, "only rank 0 saves"},
};

}  // namespace

TEST_CASE("wrong options of hybrid are refused by name") {
  check_all_refused(
      app::JobCommand(cmd::hybrid_job()),
      {
          {{"x"}, "unexpected argument 'x'"},
          {{"--trainer", "3"}, "did you mean --trainers?"},
          {{"--batch_sise=3"}, "did you mean --batch-size?"},
          {{"-x"}, "unknown option -x"},
          {{"--max-restarts", "1"}, "--max-restarts needs --checkpoint"},
          {{"--config", "x"}, "unknown option --config"},
          {{"--trainers", "0"}, "--trainers must be a whole number from 1 to 1022, not '0'"},
          {{"--trainers", "2.5"}, "--trainers must be a whole number"},
          {{"--trainers", "99999999999999999999"}, "--trainers must be a whole number"},
          {{"--epochs", "1e3"}, "--epochs must be a whole number"},
          {{"--epochs= 3"}, "--epochs must be a whole number"},
          {{"--lr", "nan"}, "--lr must be a number from"},
          {{"--lr", "inf"}, "--lr must be a number from"},
          {{"--lr", "0.1x"}, "--lr must be a number from"},
          {{"--lr", "-0.1"}, "--lr must be a number from 0"},
          {{"--seed", "-1"}, "--seed must be"},
          {{"--rpc-timeout", "0"}, "--rpc-timeout must be a number above 0"},
          {{"--collective-timeout", "-1"}, "--collective-timeout must be a number from 0"},
          {{"--master-port", "65536"}, "--master-port must be"},
          {{"--lr"}, "--lr needs a value"},
          {{"--lr="}, "--lr needs a value"},
          {{"--data", "--local"}, "--data needs a value"},
          {{"--optimizer", "adgrad"}, "did you mean adagrad?"},
          {{"--mode", "both"}, "must be one of async, sync"},
          {{"--transport", "ib"}, "must be one of auto, tcp, unix"},
          {{"--test-data", "/dev/null"}, "--test-data needs --data"},
          {{"--lr-schedule", "foo"}, "--lr-schedule: unknown schedule 'foo': must be constant"},
          {{"--lr-schedule", "step:x"}, "--lr-schedule step:x: its size is 'x'"},
          {{"--trainers", "3", "--world-size", "4"}, "a world of 5 ranks, --world-size says 4"},
          {{"--world_size", "2"}, "--world-size 2 is too small"},
          {{"--rank", "4", "--world-size", "4"}, "there is no rank 4 in a world of 4 ranks"},
          {{"--ranks", "0-1,1"}, "--ranks names rank 1 twice"},
          {{"--ranks", "3-1"}, "--ranks must be a list"},
          {{"--ranks", "0-9"}, "there is no rank 9"},
          {{"--rank", "0", "--ranks", "0-1"}, "--rank excludes --ranks"},
          {{"--rank", "0", "--spawn"}, "--rank excludes --spawn"},
          {{"--local", "--rank", "0"}, "--local excludes --rank"},
          {{"--inject", "stage=1s"}, "no stages"},
      });
}

TEST_CASE("wrong options of ps are refused by name") {
  check_all_refused(
      app::JobCommand(cmd::ps_job()),
      {
          {{"--embedding-dim", "3"}, "unknown option --embedding-dim"},
          {{"--prompt", "x"}, "unknown option --prompt"},
          {{"--mode", "both"}, "must be one of async, sync, ssp"},
          {{"--mode", "SSP"}, "must be one of async, sync, ssp, not 'SSP'; did you mean ssp?"},
          {{"--mode", "sync", "--max-restarts", "1"},
           "--max-restarts needs --checkpoint in --mode sync"},
          {{"--trainers", "1", "--max-restarts", "1"},
           "--max-restarts needs --checkpoint, or more --trainers than --min-trainers"},
          {{"--dropout", "1"}, "--dropout must be on, off or a number from 0 to below 1"},
          {{"--dropout", "-0.1"}, "--dropout must be on, off or a number from 0 to below 1"},
          {{"--dropout", "onn"}, "--dropout must be on, off or a number from 0 to below 1, not '"},
          {{"--std", "0"}, "--std must be a number above 0"},
          {{"--mean", "inf"}, "--mean must be a number from"},
          {{"--steps", "-1"}, "--steps must be a whole number from 0"},
          {{"--trainers", "3", "--world-size", "3"}, "a world of 4 ranks, --world-size says 3"},
      });
}

TEST_CASE("wrong options of rnn are refused by name") {
  check_all_refused(app::JobCommand(cmd::rnn_job()),
                    {
                        {{"--mode", "ssp"}, "must be one of async, sync, not 'ssp'"},
                        {{"--dropout", "1"}, "--dropout must be a number from 0 to below 1"},
                        {{"--vocab-size", "1"}, "--vocab-size must be a whole number from 2"},
                        {{"--world-size", "1"}, "--world-size 1 is too small"},
                        {{"--valid-data", "/dev/null"}, "--valid-data needs --data"},
                        {{"--test-data", "/dev/null"}, "--test-data needs --data"},
                        {{"--prompt", "in the"}, "--prompt needs --generate"},
                    });
}

TEST_CASE("wrong options of rl are refused by name") {
  check_all_refused(app::JobCommand(cmd::rl_job()),
                    {
                        {{"--local=maybe"}, "--local takes no value"},
                        {{"--quiet="}, "--quiet takes no value"},
                        {{"--help=3"}, "--help takes no value"},
                        {{"-q=1"}, "--quiet takes no value"},
                    });
}

TEST_CASE("wrong options of pipeline are refused by name") {
  check_all_refused(
      app::JobCommand(cmd::pipeline_job()),
      {
          {{"--explain=false"}, "--explain takes no value"},
          {{"--micro-batches", "121"},
           "a batch has only 120 images: give fewer, or a larger --batch-size"},
          {{"--micro-batches", "0"}, "--micro-batches must be"},
          {{"--micro-batches", "2,,4"}, "--micro-batches must be"},
          {{"--micro-batches", "two"}, "--micro-batches must be"},
          {{"--schedule", "zigzag"}, "--schedule must be one of"},
          {{"--schedule", "1F1B"}, "not '1F1B'; did you mean 1f1b?"},
          {{"--batch-size", "2", "--micro-batches", "2", "--image-size", "32"},
           "give fewer --micro-batches, a larger --batch-size, or --image-size 33 or more"},
          {{"--micro-batches", "1,2", "--checkpoint", "/tmp/saved"},
           "need a single number in --micro-batches"},
          {{"--split", "layer9"}, "layer9"},
          {{"--split", "layer1,layer2"}, "stages"},
          {{"--stages", "50"}, "stages"},
          {{"--inject", "stage=1s@rank=0"}, "rank 0 is the master"},
          {{"--inject", "stage=fast"}, "must be a time"},
          {{"--lr-schedule", "plateau:3"},
           "--lr-schedule plateau:3: the job has neither epochs nor evaluations"},
          {{"--epochs", "3"}, "--epochs needs --data"},
          {{"--test-data", "/"}, "--test-data needs --data"},
          {{"--data", "/", "--test-data", "/"},
           "--test-data needs a single number in --micro-batches"},
          {{"--stages", "2", "--world-size", "7"}, "--world-size says 7"},
      });
}

TEST_CASE("wrong options that every job has are refused by name") {
  const testing::Folder folder;
  check_all_refused(app::JobCommand(cmd::hybrid_job()), kOfEveryJob);
  check_all_refused(app::JobCommand(cmd::rnn_job()), kOfEveryJob);
  for (Wrong wrong : kOfEveryJob) {
    wrong.arguments.insert(wrong.arguments.begin(), {"--data", folder.path()});
    check_refused(app::JobCommand(cmd::ps_job()), wrong.arguments, wrong.told);
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
  const testing::Folder folder;
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
