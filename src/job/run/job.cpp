#include "distrain/job/job.h"

#include "distrain/base/trace.h"
#include "distrain/rpc/device.h"
#include "run/run_trace.h"

namespace distrain::job {

Outcome run_local_job(const Job& job, EventSink& sink,
                      const std::function<Outcome(const Job& placed)>& run) {
  RunTrace trace(sink);
  trace.start(job.effective, 1);
  trace.begin_alone();
  const base::TraceBinding binding(trace.tracer(), "main");
  Outcome outcome;
  try {
    Job placed = job;
    if (job.choose_devices) placed.devices = job.choose_devices("local", {});
    rpc::make_current(placed.device());
    outcome = run(placed);
  } catch (...) {
    // Keeps the first error. A job that failed before it recorded anything keeps an existing file.
    if (!trace.tracer()->tracks().empty()) trace.write_own(job.rank, "local");
    throw;
  }
  outcome.afterwards = trace.write_own(job.rank, "local");
  return outcome;
}

Json device_names(const std::vector<c10::Device>& devices) {
  if (devices.size() == 1) return devices.front().str();
  Json names = Json::array();
  for (const c10::Device& device : devices) names.push_back(device.str());
  return names;
}

}  // namespace distrain::job
