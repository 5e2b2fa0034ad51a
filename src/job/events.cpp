#include "distrain/job/events.h"

#include <cmath>

namespace distrain::job {

namespace {

using enum FieldType;

void append(std::vector<Field>& fields, const std::vector<Field>& more) {
  fields.insert(fields.end(), more.begin(), more.end());
}

Field device_field() {
  return {"device", kNames, "device of the rank, such as cpu or cuda:0; a list if it has several"};
}

Event end_event(std::string name, std::string when) {
  Event event{
      std::move(name),
      std::move(when),
      {{"status", kText, "ok or failed"},
       {"exit_code", kInteger, "exit status of the process"},
       {"scope", kText,
        "job: sums up all ranks, or all known ones if the job failed; rank: sums up the ranks of "
        "this process; live_rrefs and live_contexts always count the latter"},
       {"wall_s", kNumber, "seconds from the start of the process to its end"},
       {"train_s", kNumber,
        "seconds from the first step to the last, on the rank that took longest"},
       {"steps", kInteger, "steps of all trainers in the scope"},
       {"steps_per_s", kNumber, "steps / train_s"},
       {"cpu_s", kNumber, "CPU time of all ranks in the scope in seconds"},
       {"rpc",
        kObject,
        "RPC traffic of all ranks in the scope",
        {{"calls", kInteger, "calls made"},
         {"bytes_out", kInteger, "bytes sent"},
         {"bytes_in", kInteger, "bytes received"}}},
       {"rss_mb", kNumber, "peak resident memory of the largest rank in the scope, in MB"},
       {"live_rrefs", kInteger, "remote references that were not released; 0 after a clean job"},
       {"live_contexts", kInteger, "autograd contexts that were not closed; 0 after a clean job"},
       sometimes(or_null({"seed", kInteger,
                          "value of --seed; in `rank_end` only of rank 0 or if another launcher "
                          "started rank 0"})),
       sometimes(or_null({"config", kObject,
                          "options of the job, as in `start`, but with the numbers that the data "
                          "sets: rows, classes, words"})),
       sometimes({"restarts", kInteger, "number of restarts, with --max-restarts"}),
       sometimes({"updates", kInteger,
                  "updates of remote parameters in this run, on all ranks in the scope"}),
       sometimes(device_field()),
       sometimes({"device_mem_mb", kNumber, "peak memory of tensors on a GPU, in MB"})}};
  // The fields that describe the first failed rank.
  std::vector<Field> of_cause = {
      {"kind", kText, "kind of the error, such as peer_lost"},
      {"message", kText, "error message in one line"},
      or_null({"cause_rank", kInteger, "rank that failed first"}),
      or_null({"cause_role", kText, "role of that rank"}),
      or_null({"host", kText, "host of that rank"}),
      or_null({"signal", kText, "signal that ended that rank, such as SIGKILL"}),
      {"stderr_tail", kTexts, "last lines that the rank wrote on standard error"},
  };
  for (Field& field : of_cause) {
    field.what += ", if the job failed or was stopped";
    event.fields.push_back(sometimes(std::move(field)));
  }
  return event;
}

Field quality(Unit unit) {
  if (unit == Unit::kWords) return {"perplexity", kNumber, "exp(loss)"};
  return sometimes(
      {"accuracy", kNumber, "share of correctly predicted examples, if the job counts them"});
}

Field auc_field() {
  return sometimes({"auc", kNumber,
                    "area under the ROC curve, if the job computes it; null if one of the two "
                    "classes is missing"});
}

}  // namespace

const char* counted(Unit unit) { return unit == Unit::kWords ? "words" : "samples"; }

Json fields_of(const Evaluation& evaluation, Unit unit) {
  if (evaluation.samples == 0) return Json::object();
  Json fields{{"loss", evaluation.loss()}};
  if (unit == Unit::kWords) {
    fields["perplexity"] = std::exp(evaluation.loss());
  } else if (evaluation.right) {
    fields["accuracy"] =
        static_cast<double>(*evaluation.right) / static_cast<double>(evaluation.samples);
  }
  if (evaluation.has_auc()) fields["auc"] = evaluation.auc();
  fields[counted(unit)] = evaluation.samples;
  for (const auto& [name, sum] : evaluation.sums) fields[name] = sum;
  for (const auto& [name, sum] : evaluation.means) {
    fields[name] = sum / static_cast<double>(evaluation.samples);
  }
  return fields;
}

Field sometimes(Field field) {
  field.is_sometimes = true;
  return field;
}

Field or_null(Field field) {
  field.is_nullable = true;
  return field;
}

std::vector<Event> common_events() {
  return {
      {"start",
       "printed as the first line of each rank",
       {or_null({"world_size", kInteger, "number of ranks; null until rank 0 has sent it"}),
        {"pid", kInteger, "process id of the rank"},
        {"host", kText, "host of the rank"},
        {"version", kText, "version of distrain"},
        {"torch", kText, "version of LibTorch"},
        or_null({"seed", kInteger, "value of --seed; null until rank 0 has sent it"}),
        {"threads", kInteger, "threads per operation; `ready` has the final number"},
        or_null(device_field()),
        {"transport", kText, "transport that --transport asks for"},
        {"shared_memory", kFlag,
         "whether large tensors between ranks of one host that use unix sockets go through shared "
         "memory"},
        {"trust", kText,
         "ranks that are admitted: token (they know it), user (same user and host) or anybody"},
        or_null(
            {"data", kText,
             "value of --data, or the generated data: random batches, labels or images; null if "
             "there is none, or until rank 0 has sent it"}),
        {"config", kObject, "options of the job; each is null until rank 0 has sent it"}}},
      {"waiting",
       "printed every 5 s while ranks are missing, or while `--rank auto` waits for a free rank",
       {{"missing", kIntegers, "ranks that are not ready (only rank 0 knows them: others print 0)"},
        sometimes({"address", kText, "expected address of rank 0"}),
        sometimes({"reason", kText, "why ranks are missing, or why rank 0 cannot be joined"})}},
      {"ready",
       "printed by each rank when all ranks have joined",
       {{"world_size", kInteger, "number of ranks"},
        {"transport", kText, "transport between this rank and the others"},
        {"threads", kInteger, "threads per operation"},
        {"startup_s", kNumber, "seconds since the start of the process or its launcher"},
        sometimes(device_field())}},
      {"ddp",
       "tells how trainers on GPUs average their gradients",
       {{"ddp", kText, "staged (through CPU memory) or nccl"}}},
      {"checkpoint",
       "printed when a checkpoint was saved or loaded",
       {{"action", kText, "saved or loaded"},
        {"path", kText, "folder of the checkpoint"},
        {"step", kInteger, "number of completed steps, batches or episodes"},
        {"wall_s", kNumber, "duration of the save or load in seconds"},
        sometimes({"held_s", kNumber, "seconds that training paused for the save"}),
        sometimes(
            {"stalled_s", kNumber,
             "seconds for which updates of tables waited for the save, at most on a server"})}},
      {"restart",
       "printed when the launcher restarts ranks (--max-restarts)",
       {{"ranks", kIntegers, "ranks that restart: all of this launcher's, or one lost trainer"},
        or_null({"generation", kInteger,
                 "restarts of the whole job; null if another launcher started rank 0"}),
        {"restarts_left", kInteger, "number of restarts that are left"},
        or_null(
            {"checkpoint", kText, "newest checkpoint, from which the whole job resumes, if any"}),
        {"after_s", kNumber, "delay before the restart in seconds"},
        {"kind", kText, "kind of the error, such as peer_lost"},
        {"cause", kText, "error message in one line"},
        or_null({"cause_rank", kInteger, "rank that failed"})}},
      {"config",
       "printed by --print-config",
       {{"config", kObject, "value of each option; null until rank 0 has sent it"},
        {"origins", kObject,
         "origin of each value: default, command line, config file FILE, environment variable "
         "NAME, checkpoint PATH, derived (from other options) or rank 0"}}},
      {"plan",
       "printed by --dry-run for each rank that would start, in its name",
       {{"mode", kText, "spawn (by a launcher), join (this process is the rank) or local"},
        or_null({"world_size", kInteger, "number of ranks; null if only rank 0 knows it"}),
        {"host", kText, "host of the rank"},
        {"threads", kInteger, "threads per operation"},
        or_null(device_field()),
        or_null({"gpu_turn", kInteger, "place among ranks that take the host's GPUs in turn"}),
        {"local_ranks", kInteger, "number of ranks on this host, as far as known"},
        {"one_host", kFlag, "another launcher says that all ranks are on this host"},
        {"master_addr", kText, "host of rank 0"},
        or_null({"master_port", kInteger, "port of rank 0; null: a free port or a unix socket"}),
        or_null({"job_id", kText, "id of the job"}),
        or_null({"generation", kInteger, "number of restarts, if another launcher tells it"}),
        or_null({"source", kText, "option or variable that sets the rank"}),
        or_null({"resume", kText, "checkpoint that the job would resume from"})}},
      {"warn",
       "printed to warn of a problem that does not end the job",
       {{"kind", kText, "kind of the problem"}, {"message", kText, "warning in one line"}}},
      {"error",
       "printed by each rank that fails or notices a failure",
       {{"kind", kText, "kind of the error, such as peer_lost"},
        {"message", kText, "error message in one line"},
        or_null({"cause_rank", kInteger, "rank that failed first"}),
        or_null({"op", kText, "operation that failed"}),
        {"elapsed_s", kNumber, "seconds since the start of the process or its launcher"},
        {"exit_code", kInteger, "exit status for this kind of error"}}},
      end_event("rank_end", "printed as the last line of each rank that a launcher started"),
      end_event("end", "printed as the last line of each command"),
  };
}

Event step_event(std::vector<Field> more) {
  std::vector<Field> fields{
      {"epoch", kInteger, "number of the epoch, from 1"},
      {"step", kInteger, "number of the step, from 1, including steps before a resume"},
      {"loss", kNumber, "loss of the step's batch"},
      {"lr", kNumber, "learning rate of the step"}};
  append(fields, more);
  return {"step", "printed after a step, as --log-interval says", std::move(fields)};
}

Event eval_event(std::string when, Unit unit) {
  return {"eval",
          std::move(when),
          {{"set", kText, "valid (after each epoch) or test (at the end)"},
           {"epoch", kInteger, "number of the epoch that ended or was stopped, from 1"},
           {"step", kInteger, "steps of each trainer so far"},
           {"loss", kNumber, "mean loss of the evaluated data"},
           quality(unit),
           auc_field(),
           {counted(unit), kInteger, std::string("number of evaluated ") + counted(unit)},
           sometimes({"lr", kNumber, "learning rate so far, with the plateau schedule"})}};
}

std::vector<Event> trainer_events(bool may_lose, Unit unit) {
  const std::string what = counted(unit);
  Event epoch{
      "epoch",
      "printed by each trainer at the end of an epoch",
      {{"epoch", kInteger, "number of the epoch, from 1"},
       {"loss", kNumber, "mean loss of the epoch's steps; null if there were none"},
       {"steps", kInteger, "steps of this trainer in the epoch"},
       {what, kInteger, what + " of this trainer in the epoch"},
       {"wall_s", kNumber, "duration of the epoch in seconds"},
       sometimes({"partial", kFlag, "true if the job ended within the epoch"}),
       sometimes({"data_wait_s", kNumber, "seconds that the steps waited for streamed data"}),
       sometimes({"bad_rows", kInteger, "rows of streamed data skipped so far"})}};
  if (unit == Unit::kWords) epoch.fields.push_back(quality(unit));
  Event eval = eval_event("printed at the end of an epoch or of the job", unit);
  Event end{"end",
            "",
            {sometimes({"loss", kNumber, "mean loss of all trainers in the last epoch"}),
             sometimes(quality(unit)), auc_field(),
             sometimes({"bad_rows", kInteger, "rows of streamed data that all trainers skipped"}),
             sometimes({"eval", kObject, "last `eval` line", eval.fields}),
             sometimes({"ddp", kText, "how trainers on GPUs average gradients: staged or nccl"})}};
  end.fields[1].what = unit == Unit::kWords ? "exp(loss)" : "accuracy of the last evaluation";
  std::vector<Event> events{
      step_event({{what + "_per_s", kNumber, what + " per second of this trainer"}}),
      std::move(epoch), std::move(eval)};
  if (may_lose) {
    events.push_back(
        {"lost",
         "printed when a trainer is lost and the job continues without it",
         {{"lost_rank", kInteger, "rank of the lost trainer"},
          {"lost_role", kText, "role of the lost trainer"},
          {"incarnation", kInteger, "number of earlier processes with this rank"},
          {"kind", kText, "kind of the error, such as peer_lost"},
          {"cause", kText, "error message in one line"},
          {"steps_made", kInteger, "steps that the trainer completed"},
          {"steps_back", kInteger, "steps that the trainer had begun and that go to the others"},
          {"steps_in_doubt", kInteger,
           "part of steps_back that may have been applied, if rank 0 holds no parameters; "
           "does not count what only other servers have applied"},
          {"trainers_left", kInteger, "number of remaining trainers"}}});
    events.push_back({"returned",
                      "printed when a new process replaces a lost trainer",
                      {{"returned_rank", kInteger, "rank of the trainer"},
                       {"returned_role", kText, "role of the trainer"},
                       {"incarnation", kInteger, "number of earlier processes with this rank"}}});
    end.fields.push_back(sometimes(
        {"lost", kInteger, "number of lost trainers, if the job can continue without them"}));
  }
  events.push_back(std::move(end));
  return events;
}

void add_metric(std::vector<Event>& events, const std::string& name, std::string what) {
  const auto eval = std::ranges::find(events, "eval", &Event::name);
  const bool is_missing = eval == events.end();
  if (is_missing || std::ranges::find(eval->fields, name, &Field::name) != eval->fields.end()) {
    base::invalid("the metric " + name + ": eval lines " +
                  (is_missing ? "are none of this job's" : "have a field of that name"));
  }
  eval->fields.push_back({name, kNumber, std::move(what)});
  for (Event& event : events) {
    const auto last = std::ranges::find(event.fields, "eval", &Field::name);
    if (last != event.fields.end()) last->fields = eval->fields;
  }
}

std::vector<Event> with_events(std::vector<Event> events, const std::vector<Event>& more) {
  const auto find = [&events](const std::string& name) {
    return std::ranges::find(events, name, &Event::name);
  };
  for (const Event& event : more) {
    const auto there = find(event.name);
    if (there == events.end()) {
      events.push_back(event);
      continue;
    }
    append(there->fields, event.fields);
    const auto rank_end = find("rank_end");
    if (event.name == "end" && rank_end != events.end()) append(rank_end->fields, event.fields);
  }
  return events;
}

}  // namespace distrain::job
