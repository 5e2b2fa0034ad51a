#include "distrain/job/session.h"

#include <algorithm>

#include "distrain/autograd/context.h"
#include "distrain/base/clock.h"
#include "distrain/cuda/device_choice.h"
#include "distrain/rpc/device.h"

namespace distrain::job {

namespace {

std::chrono::nanoseconds seconds(double s) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(s));
}

}  // namespace

Session::Session(const Job& job, std::vector<std::string> names, EventSink& sink)
    : job_(job), sink_(sink), trace_(sink) {
  rpc::AgentOptions options;
  if (!job.name.empty()) options.job_id = "distrain " + job.name;
  options.rank = job.rank;
  options.names = std::move(names);
  options.world_size = job.world_size;
  options.master_addr = job.master_addr;
  options.master_port = job.master_port;
  options.listen_fd = job.listen_fd;
  options.listen_addr = job.listen_addr;
  options.transport = job.transport;
  options.rpc_timeout = seconds(job.rpc_timeout_s);
  options.join_timeout = seconds(job.join_timeout_s);
  options.peer_timeout = seconds(job.peer_timeout_s);
  options.call_delay = seconds(job.inject.call_delay_s);
  options.tracer = trace_.tracer();
  options.job_options = job.rank == 0 ? job.effective : job.given;
  options.on_waiting = [this](const std::vector<int>& missing, const std::string& address) {
    tell_waiting(missing, address);
  };
  agent_ = std::make_unique<rpc::Agent>(std::move(options));
  autograd::install(*agent_);
  updates_ = optim::install(*agent_);
}

void Session::tell_waiting(const std::vector<int>& missing, const std::string& address) {
  Json fields{{"missing", missing}};
  if (!address.empty()) fields["address"] = address;
  sink_.emit("waiting", fields);
}

void Session::choose_devices() {
  if (job_.choose_devices) {
    job_.devices = job_.choose_devices(agent_->name(), agent_->job_options());
  }
  agent_->set_device(job_.device());
}

base::Error Session::with_rank(base::Error error) const {
  const int own = agent_->rank();
  if (error.rank < 0) error.rank = own;
  const int rank = error.rank;
  if (error.kind != base::ErrorKind::kResources) return error;
  if (rank == own) {
    if (!rpc::is_accelerator(job_.device())) return error;
    return cuda::error_of_rank(std::move(error), rank, agent_->name());
  }
  // Where others compute is known once all are there.
  if (!joined_ || rank >= agent_->world_size()) return error;
  if (agent_->device_of(rank) == c10::Device(c10::kCPU).str()) return error;
  return cuda::error_of_rank(std::move(error), rank, agent_->worker(rank).name);
}

void Session::join(const std::function<void()>& prepare) {
  agent_->join([&] {
    trace_.start(agent_->job_options(), std::max(job_.world_size, agent_->world_size()));
    choose_devices();
    prepare();
  });
  joined_ = true;
  sink_.joined(agent_->name(), agent_->job_options());
  Json fields{{"world_size", agent_->world_size()},
              {"transport", agent_->transport()},
              {"startup_s", base::seconds_since(job_.started)}};
  if (rpc::is_accelerator(job_.device())) fields["device"] = device_names(job_.devices);
  sink_.emit("ready", fields);
  trace_.begin(*agent_);
}

void Session::finish(Outcome& outcome) {
  // Waiting for the end of others is no trouble: it takes as long as their work does.
  rpc::Traffic traffic;
  agent_->shutdown({}, [&] {
    traffic = agent_->traffic();  // what gathers the trace is not of the job
    trace_.collect();
  });
  outcome.fields["rpc"] = {
      {"calls", traffic.calls}, {"bytes_out", traffic.bytes_out}, {"bytes_in", traffic.bytes_in}};
  outcome.fields["live_rrefs"] = agent_->live_rrefs();
  outcome.fields["live_contexts"] = agent_->live_contexts();
  outcome.afterwards = trace_.write();
}

// Of a job that failed: rank 0's part is better than none.
void Session::write_what_there_is() { trace_.write_own(agent_->rank(), agent_->name()); }

Json device_names(const std::vector<c10::Device>& devices) {
  if (devices.size() == 1) return devices.front().str();
  Json names = Json::array();
  for (const c10::Device& device : devices) names.push_back(device.str());
  return names;
}

}  // namespace distrain::job
