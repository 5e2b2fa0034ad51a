#pragma once

#include <functional>
#include <memory>
#include <string>

#include "devices.h"
#include "distrain/job/job.h"
#include "process/display.h"
#include "process/process_setup.h"

namespace distrain::app {

/// The rank that this process runs: a spawned rank, a rank that joins, or the local job.
struct RankRun {
  std::string role;  ///< empty if unknown before this rank has joined
  job::Job job;
  /// Returns the `config` field. If `of_rank_0` is empty, options inherited from rank 0 are null.
  std::function<job::Json(const job::OptionMap& of_rank_0)> config;
  job::Json data;  ///< the training data, for `start`
  std::string warning;
  int threads = 0;
  int local_ranks = 1;
  std::shared_ptr<RankDevices> devices;
  bool knows_devices = false;  ///< the devices do not depend on rank 0's options
  bool all_here = false;       ///< one launcher runs all ranks, or the job is local
  int out_fd = -1;
  bool shows_progress = false;  ///< the rank is spawned, and the launcher shows its progress
  DisplayPlan display;          ///< if the rank is not spawned
  std::function<job::Outcome(const job::Job&, job::EventSink&)> body;
};

/// Runs a rank and returns the exit code: emits `start`, runs the body, emits `error` if the body
/// throws, then emits the last line. A thread handles signals; if one stopped the body, the exit
/// code is the signal's. If stdout cannot be written, stops a job that saves and exits from any
/// other. Call _exit() or leave_process() afterwards, because threads may still run.
///
/// `start` is the first line, before this rank contacts rank 0: on a rank that joins, `world_size`,
/// `role`, `device` and inherited fields of `config` may be null in it.
int run_rank(const RankRun& run);

}  // namespace distrain::app
