#include "distrain/app/main.h"

#include "hybrid.h"
#include "pipeline.h"
#include "ps.h"
#include "rl.h"
#include "rnn.h"

int main(int argc, char** argv) {
  using namespace distrain::cmd;
  return distrain::app::main(
      argc, argv,
      {hybrid_command(), ps_command(), rnn_command(), rl_command(), pipeline_command()});
}
