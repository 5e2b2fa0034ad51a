#include "distrain/app/main.h"

#include "jobs.h"

int main(int argc, char** argv) {
  return distrain::app::main(
      argc, argv, distrain::cmd::jobs(),
      {"distributed training over RPC, in C++ on LibTorch",
       "Trains a model across processes and machines.",
       {{"distrain hybrid", "A job of four ranks on this machine"},
        {"distrain hybrid --trainers 4 --mode sync | jq -c 'select(.event==\"end\")'",
         "Its result alone"},
        {"distrain hybrid --rank 0 --master-addr node0",
         "One rank of a job; --rank 1, 2 and 3 are started on other machines"},
        {"distrain ps --checkpoint saved --resume auto", "A job that goes on where it was"},
        {"distrain pipeline --micro-batches 4 --trace trace.json",
         "What each rank does, and when"}}});
}
