#include "distrain/app/main.h"

#include "jobs.h"

int main(int argc, char** argv) {
  return distrain::app::main(
      argc, argv, distrain::cmd::jobs(),
      {"train PyTorch models across processes, in C++ on LibTorch",
       "Trains models across processes and machines.",
       {{"distrain hybrid --data teacher", "Train on four ranks of this machine"},
        {"distrain ps --checkpoint saved --resume auto",
         "Save checkpoints; the same command resumes from the newest"},
        {"distrain hybrid --rank 0 --master-addr node0",
         "Start rank 0 of four; start --rank 1, 2 and 3 on other machines"},
        {"distrain hybrid --trainers 4 --mode sync | jq -c 'select(.event==\"end\")'",
         "Print only the result"},
        {"distrain pipeline --micro-batches 4 --trace trace.json",
         "Record what each rank does, and when"}}});
}
