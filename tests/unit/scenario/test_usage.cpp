// Tests that a wrong option gives exit code 2 and one clear error in each job, spelled either way.
#include "../cmd/jobs.h"
#include "support/catch.h"
#include "support/refusal.h"
#include "support/scenario_data.h"

using namespace distrain;
using namespace distrain::testing;

TEST_CASE("wrong options of hybrid are refused by name") {
  check_all_refused(
      app::JobCommand(cmd::hybrid_job()),
      {
          {{"x"}, "unexpected argument 'x'"},
          {{"--trainer", "3"}, "did you mean --trainers?"},
          {{"--batch_sise=3"}, "did you mean --batch-size?"},
          {{"-x"}, "unknown option -x"},
          {{"--max-restarts", "1"}, "--max-restarts needs --checkpoint"},
          {{"--config", "x"}, "--config x: No such file or directory"},
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
          {{"--rpc-timeout", "0"}, "--rpc-timeout must be a time above 0"},
          {{"--collective-timeout", "-1"}, "--collective-timeout must be a time from 0"},
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
          {{"--table", "module", "--servers", "2"}, "--servers 2 needs --table sharded"},
          {{"--table", "module", "--wire-dtype", "fp16"},
           "--wire-dtype fp16 needs --table sharded"},
          {{"--prefetch", "2", "--mode", "sync"}, "--prefetch needs --mode async"},
          {{"--servers", "2", "--device", "trainer=cpu,ps3=cuda"}, "rows in host memory"},
          {{"--servers", "2", "--momentum", "0.9"}, "momentum"},
          {{"--servers", "2", "--world-size", "3"}, "--world-size 3 is too small"},
          {{"--hash-bits", "63"}, "--hash-bits must be a whole number from 0 to 62"},
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
          {{"--explain=no"}, "--explain takes no value"},
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
