#include "distrain/app/job_command.h"

#include <algorithm>
#include <cstdio>
#include <random>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "common_options.h"
#include "distrain/app/checks.h"
#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/net/socket.h"
#include "process/inject.h"
#include "process/json_lines.h"
#include "process/launcher.h"
#include "process/output.h"
#include "process/rank_process.h"
#include "process/spawned_rank.h"
#include "saved_options.h"

namespace distrain::app {
namespace {

// A save may take long, and to kill a rank in the midst of it would lose what a signal asks for.
constexpr auto kSaveGrace = std::chrono::seconds(60);

/// What the `start` line shows, named with `_` as JSON lines are. `inherits`: what was not given
/// here is rank 0's to tell.
Json config_of(const ParsedOptions& options, bool inherits) {
  Json config = Json::object();
  for (const Option& option : options.table()) {
    if (!is_job_option(option)) continue;
    const bool untold = inherits && !options.given(option.name);
    config[json_name(option)] = untold ? Json() : json_value(option, options.text(option.name));
  }
  return config;
}

/// Of a run: 16 hexadecimal digits.
std::string random_id() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

job::Job make_job(const JobCommand& command, const ParsedOptions& options,
                  const Placement& placement, base::TimePoint started) {
  job::Job job;
  job.name = command.line.name;
  job.rank = std::max(placement.rank, 0);
  job.world_size = placement.world_size;
  job.master_addr = placement.master_addr;
  job.master_addr_given = placement.master_addr_given;
  job.master_port = static_cast<uint16_t>(placement.master_port);
  job.listen_addr = options.text("listen");
  job.transport = options.text("transport");
  job.started = started;
  job.rpc_timeout_s = options.real("rpc-timeout");
  job.join_timeout_s = options.real("join-timeout");
  job.peer_timeout_s = options.real("peer-timeout");
  for (const Option& option : options.table()) {
    if (!is_job_option(option)) continue;
    const bool untold = option.each_own && !options.decided(option.name);
    job.effective[option.name] = untold ? "" : options.text(option.name);
    // A path may well differ from host to host, so it is not among what has to agree.
    if (option.scope == Scope::kJob && options.given(option.name)) {
      job.given[option.name] = options.text(option.name);
    }
  }
  if (placement.has_rank_0()) job.effective[job::kRunId] = random_id();
  return job;
}

RankRun make_run(const JobCommand& command, const ParsedOptions& options,
                 const Placement& placement, const job::Job& job) {
  const bool local = placement.mode == Placement::Mode::kLocal;
  const bool inherits = !local && job.rank != 0 && !placement.spawns_all();
  RankRun run;
  run.job = job;
  run.job.inject = injection_of(parse_injections(options.text("inject")), job.rank);
  run.config = [&options, inherits](const OptionMap& of_rank_0) {
    if (of_rank_0.empty()) return config_of(options, inherits);
    return config_of(adopt_options(options, of_rank_0), false);
  };
  run.threads = static_cast<int>(options.integer("threads"));
  run.local_ranks = placement.local_ranks;
  if (local) {
    run.role = "local";
    run.shown_world_size = 1;
  } else if (placement.world_size != 0) {
    run.role = command.role(options, job.rank);
    run.shown_world_size = placement.world_size;
  }
  run.devices =
      std::make_shared<RankDevices>([&command, &options, &placement, rank = job.rank](
                                        const std::string& name, const OptionMap& of_rank_0) {
        return choose_devices(adopt_options(options, of_rank_0), command.devices, placement,
                              {rank, name, command.role}, process_environment);
      });
  run.job.choose_devices = [devices = run.devices](const std::string& name,
                                                   const OptionMap& of_rank_0) {
    return devices->get(name, of_rank_0);
  };
  run.all_here = local || placement.spawns_all();
  run.knows_devices = !run.role.empty() && (!inherits || options.given("device"));
  run.body = [&command, &options, local](const job::Job& j, job::EventSink& sink) {
    return command.run(options, j, local, sink);
  };
  return run;
}

/// The whole process is one rank. Its lines go to a copy of stdout, and stdout itself becomes
/// stderr: what a library prints must not get between them.
int run_here(RankRun run, const Placement& placement) {
  run.last_event = "end";
  run.warning = placement.warning;
  run.out_fd = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  dup2(STDERR_FILENO, STDOUT_FILENO);
  block_ending_signals();
  leave_process(run_rank(run));
}

/// Binds before any rank is there, so that a taken port is known at once and nobody else can take
/// it meanwhile.
int listen_for_rank_0(const ParsedOptions& options, const Placement& placement, job::Job& job) {
  if (placement.ranks.front() != 0) return -1;
  const std::string wanted = options.text("listen");
  std::string host = !wanted.empty() ? wanted : placement.master_addr;
  if (host == "localhost") host = "127.0.0.1";
  const auto port = static_cast<uint16_t>(placement.master_port);
  net::Fd socket = std::move(net::listen_tcp(host, port, wanted.empty()).value());
  job.master_port = net::local_name(socket.get()).port;
  if (placement.spawns_all() && !placement.master_addr_given) job.master_addr = host;
  return socket.release();
}

/// A rank under the launcher, in a process of its own.
int run_spawned(const JobCommand& command, const ParsedOptions& options, const Placement& placement,
                job::Job job, const SpawnedRank& spawned) {
  job.spawned = true;
  job.rank = spawned.rank;
  job.listen_fd = spawned.listen_fd;
  job.master_addr = spawned.master_addr;
  job.master_port = spawned.master_port;
  job.started = spawned.started;
  if (!spawned.run_id.empty()) job.effective[job::kRunId] = spawned.run_id;
  RankRun run = make_run(command, options, placement, job);
  run.last_event = "rank_end";
  run.out_fd = spawned.out_fd;
  return run_rank(run);
}

int launch(const JobCommand& command, const ParsedOptions& options, const Placement& placement,
           job::Job job) {
  LaunchPlan plan;
  plan.told.listen_fd = listen_for_rank_0(options, placement, job);
  plan.cmd = command.line.name;
  if (placement.has_rank_0()) plan.told.run_id = job.effective.at(job::kRunId);
  plan.config = config_of(options, !placement.has_rank_0());
  plan.ranks = placement.ranks;
  plan.role = [&](int rank) {
    return placement.world_size != 0 ? command.role(options, rank) : std::string();
  };
  plan.rank_main = [&](const SpawnedRank& spawned) {
    return run_spawned(command, options, placement, job, spawned);
  };
  plan.told.started = job.started;
  plan.told.master_addr = job.master_addr;
  plan.told.master_port = job.master_port;
  plan.peer_timeout_s = job.peer_timeout_s;
  // Without rank 0 here, it may be saving elsewhere.
  if (!placement.has_rank_0() || options.given("checkpoint")) plan.save_grace = kSaveGrace;
  plan.warning = placement.warning;
  plan.progress = !options.flag("quiet");
  plan.epochs = static_cast<int>(options.integer("epochs"));
  return run_launcher(plan);
}

/// Of the ranks here, by rank: which of the GPUs they take in turn, null for those that do not.
Json gpu_places(const ParsedOptions& options, const Placement& placement,
                const JobCommand& command) {
  std::vector<int> ranks = placement.ranks;
  if (placement.mode != Placement::Mode::kSpawn) ranks = {std::max(placement.rank, 0)};
  Json places = Json::object();
  for (const int rank : ranks) {
    const std::string name =
        placement.mode == Placement::Mode::kLocal ? "local" : command.role(options, rank);
    const auto place = place_in_turn(options, command.devices, placement,
                                     {rank, name, command.role}, process_environment);
    places[std::to_string(rank)] = place ? Json(*place) : Json();
  }
  return places;
}

std::string dump_placement(const ParsedOptions& options, const Placement& placement,
                           const JobCommand& command) {
  constexpr const char* kModes[] = {"local", "join", "spawn"};
  Json json{{"mode", kModes[static_cast<int>(placement.mode)]},
            {"rank", placement.rank >= 0 ? Json(placement.rank) : Json()},
            {"ranks", placement.ranks},
            {"world_size", placement.world_size ? Json(placement.world_size) : Json()},
            {"source", placement.source},
            {"master_addr", placement.master_addr},
            {"master_port", placement.master_port ? Json(placement.master_port) : Json()},
            {"local_ranks", placement.local_ranks},
            {"gpu_places", gpu_places(options, placement, command)},
            {"warning", placement.warning}};
  json[command.size.option] = options.integer(command.size.option);
  return json.dump() + '\n';
}

}  // namespace

int run_job_command(const JobCommand& command, const std::vector<std::string>& args,
                    base::TimePoint started) {
  const std::optional<SpawnedRank> spawned = take_spawned_rank();
  try {
    ParsedOptions options = parse_options(command.table, args);
    std::string changed;
    Placement placement = place(options, command.size, process_environment, [&] {
      changed = take_resumed_options(options, command.line.name);
    });
    if (!changed.empty()) placement.warn(changed);
    if (options.flag("dump-placement")) {
      return print_text(dump_placement(options, placement, command));
    }
    if (command.complete) command.complete(options);
    if (spawned) {  // the launcher has checked what follows
      const job::Job job = make_job(command, options, placement, spawned->started);
      _exit(run_spawned(command, options, placement, job, *spawned));
    }
    command.check(options, placement);
    check_devices(options, command.devices, placement, command.role);
    check_checkpoint(options, placement);
    check_trace(options, placement);
    check_injections(parse_injections(options.text("inject")),
                     {.saves = options.given("checkpoint"), .stages = command.has_stages},
                     placement);
    if (command.answer) {
      if (const auto text = command.answer(options)) return print_text(*text);
    }
    const job::Job job = make_job(command, options, placement, started);
    if (placement.mode == Placement::Mode::kSpawn) {
      return launch(command, options, placement, job);
    }
    return run_here(make_run(command, options, placement, job), placement);
  } catch (const base::Exception& e) {
    return report_failure(command.line.name, e.error(), started);
  }
}

int run_predict_command(const std::vector<JobCommand>& commands,
                        const std::vector<std::string>& args, base::TimePoint started) {
  const auto invalid = [](const std::string& message) {
    throw base::Exception(base::ErrorKind::kInvalid, message);
  };
  std::string cmd;
  try {
    if (args.empty() || args[0].starts_with('-')) invalid("predict needs a checkpoint");
    const bool has_file = args.size() > 1 && (args[1] == "-" || !args[1].starts_with('-'));
    const std::string input = has_file && args[1] != "-" ? args[1] : job::kStandardInput;
    const job::Snapshot saved = job::read_manifest(args[0]);
    const Json name = saved.state.value("cmd", Json());
    const auto command =
        std::find_if(commands.begin(), commands.end(),
                     [&](const JobCommand& each) { return Json(each.line.name) == name; });
    if (command == commands.end()) saved.refuse("not a checkpoint of this program's jobs");
    cmd = command->line.name;
    if (!command->predict) invalid("predict has no use for a checkpoint of " + cmd);

    ParsedOptions options =
        parse_options(command->table, {args.begin() + 1 + (has_file ? 1 : 0), args.end()});
    for (const Option& option : command->table) {
      const bool of_model = is_job_option(option) && option.group != "Checkpoints" &&
                            option.path == Option::Path::kAny;
      if (options.given(option.name) && !of_model && option.name != "threads") {
        invalid(fmt::format("--{} has no effect on predict", option.name));
      }
    }
    take_options(options, saved, Take::kWhatMustAgree);
    // Sums depend on how many threads take them.
    const Json threads = saved.state.value("threads", Json());
    if (threads.is_number_integer()) {
      const Option& option = *find_option(command->table, "threads");
      options.derive(option.name, canonical(option, threads.dump(), saved));
    }
    if (command->complete) command->complete(options);
    Placement placement;
    placement.mode = Placement::Mode::kLocal;
    const job::Job job = make_job(*command, options, placement, started);
    RankRun run = make_run(*command, options, placement, job);
    run.body = [&](const job::Job& own, job::EventSink& sink) {
      return command->predict(options, own, saved.path, input, sink);
    };
    return run_here(std::move(run), placement);
  } catch (const base::Exception& e) {
    return report_failure(cmd, e.error(), started);
  }
}

ParsedOptions adopt_options(const ParsedOptions& own, const OptionMap& of_rank_0) {
  ParsedOptions adopted = own;
  for (const Option& option : own.table()) {
    const auto it = of_rank_0.find(option.name);
    if (!is_job_option(option) || it == of_rank_0.end()) continue;
    if (option.scope == Scope::kInput && own.given(option.name)) continue;
    const std::string where = fmt::format("rank 0's --{}", option.name);
    if (it->second.empty() && (option.initial.empty() || option.each_own)) {
      // What this rank derived followed from its own options.
      if (!own.given(option.name)) adopted.derive(option.name, option.initial);
      continue;
    }
    adopted.set(option.name, canonical_value(option, it->second, where));
  }
  return adopted;
}

OptionTable detail::whole_table(OptionTable own, bool has_local) {
  OptionTable table = std::move(own);
  // By group, in the order in which they are first spoken of, but what is the job's own first.
  std::stable_partition(table.begin(), table.end(), [](const Option& option) {
    return option.group != "Training" && option.group != "Checkpoints";
  });
  std::stable_partition(table.begin(), table.end(),
                        [](const Option& option) { return option.group != "Checkpoints"; });
  append_common(table);
  std::stable_partition(table.begin(), table.end(),
                        [](const Option& option) { return option.group != "Run"; });
  if (!has_local) std::erase_if(table, [](const Option& option) { return option.name == "local"; });
  return table;
}

void detail::check_table(const ParsedOptions& options, Placement& placement) {
  if (placement.has_rank_0()) {
    for (const Option& option : options.table()) {
      if (!option.needs.empty()) check_needs(options, option.name.c_str(), option.needs.c_str());
    }
  }
  // A rank that joins does without: the data may be rank 0's to name.
  if (placement.mode == Placement::Mode::kJoin || !placement.has_rank_0()) return;
  const bool data = options.decided("data") && !options.text("data").empty();
  for (const Option& option : options.table()) {
    if (options.given(option.name) && (data ? option.random_only : option.data_only)) {
      placement.warn(
          fmt::format("--{} has no effect {} --data", option.name, data ? "with" : "without"));
    }
    if (option.path == Option::Path::kFile) check_file(options, option.name.c_str());
    if (option.path == Option::Path::kFolder) check_folder(options, option.name.c_str());
  }
}

job::Preflight detail::preflight_of(const ParsedOptions& options, Placement& placement,
                                    const job::Roles& roles) {
  job::Preflight preflight;
  preflight.local = placement.mode == Placement::Mode::kLocal;
  preflight.has_rank_0 = placement.has_rank_0();
  preflight.starts = [&placement, roles](std::string_view role) {
    if (placement.mode == Placement::Mode::kLocal) return true;
    const job::Roles::Role& ranks = roles.named(std::string(role));
    const auto is_one = [&](int rank) {
      return rank >= ranks.first && rank < ranks.first + ranks.count;
    };
    if (placement.mode == Placement::Mode::kJoin) return is_one(placement.rank);
    return std::any_of(placement.ranks.begin(), placement.ranks.end(), is_one);
  };
  preflight.given = [&options](std::string_view name) { return options.given(name); };
  preflight.text = [&options](std::string_view name) { return options.text(name); };
  preflight.warn = [&placement](const std::string& message) { placement.warn(message); };
  return preflight;
}

int report_failure(const std::string& cmd, const base::Error& error, base::TimePoint started) {
  Summary summary;
  summary.add({{"rss_mb", peak_rss_mb()}});
  Cause cause = cause_of(error);
  cause.host = host_name();
  const std::string lines[] = {
      json_line("error", {}, cmd, std::nullopt, "launcher", error_fields(cause, started)),
      json_line("end", {}, cmd, std::nullopt, "launcher", summary.end_fields(started, cause))};
  say(error.message);
  for (const std::string& line : lines) {
    const int failed = write_all(STDOUT_FILENO, line);
    if (failed) return exit_code_of_write_error(failed, false);
  }
  return cause.exit_code;
}

int print_text(const std::string& text) {
  const int error = write_all(STDOUT_FILENO, text);
  return error == 0 ? 0 : exit_code_of_write_error(error);
}

}  // namespace distrain::app
