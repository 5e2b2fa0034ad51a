#pragma once

#include <functional>
#include <memory>
#include <string>

#include "devices.h"
#include "distrain/job/job.h"
#include "process/display.h"
#include "process/process_setup.h"

namespace distrain::app {

/// One rank in this process: of the launcher's (spawned), one that joined, or the local job.
struct RankRun {
  std::string role;  ///< empty: not known before rank 0 has told the size of the job
  job::Job job;
  /// Of `start` and `end`: null where rank 0 will tell, what it has told where that is known.
  std::function<job::Json(const job::OptionMap& of_rank_0)> config;
  job::Json data;  ///< what the job trains on, for `start`
  std::string warning;
  int threads = 0;
  int local_ranks = 1;
  std::shared_ptr<RankDevices> devices;
  bool knows_devices = false;  ///< without rank 0
  bool all_here = false;       ///< all ranks are under this launcher, which ends them together
  int out_fd = -1;
  bool shows_progress = false;  ///< spawned: by the launcher
  DisplayPlan display;          ///< of a rank that is not spawned
  std::function<job::Outcome(const job::Job&, job::EventSink&)> body;
};

/// Blocks the signals that end a rank, which a thread of its own takes; emits `start`, runs the
/// body, emits `error` if it throws and the last line. A body that stopped by a signal ends as by
/// that signal. When its lines cannot be written any more, a job that saves is told to stop, too;
/// another one ends the process. Gives back the exit code; the process has to leave by `_exit` or
/// leave_process() then, because threads may still run. The `start` line comes before rank 0 is
/// asked, so that it is the first line whatever happens: on a rank that joined, `world_size`,
/// `role`, the inherited part of `config` and, with that, `device` are null there.
int run_rank(const RankRun& run);

}  // namespace distrain::app
