#include "distrain/job/events.h"

#include <algorithm>
#include <cmath>

namespace distrain::job {

namespace {

using enum FieldType;

void append(std::vector<Field>& fields, std::vector<Field> more) {
  for (Field& field : more) fields.push_back(std::move(field));
}

Field device_field() {
  return {"device", kNames,
          "where the rank computes, as in cpu or cuda:0; a list where it is several"};
}

/// Of a job that failed: where it failed first.
std::vector<Field> cause_fields() {
  std::vector<Field> fields = {
      {"kind", kText, "kind of the error, as in peer_lost"},
      {"message", kText, "what went wrong, in a line"},
      or_null({"cause_rank", kInteger, "rank where it went wrong first"}),
      or_null({"cause_role", kText, "role of that rank"}),
      or_null({"host", kText, "host of that rank"}),
      or_null({"signal", kText, "signal that ended it, as in SIGKILL"}),
      {"stderr_tail", kTexts, "the last lines that it wrote on standard error"},
  };
  for (Field& field : fields) {
    field.is_sometimes = true;
    field.what += "; of a job that failed or was stopped";
  }
  return fields;
}

Event end_event() {
  Event event{
      "end",
      "the last line of all, once: the launcher's, or that of a rank that was started by itself",
      {{"status", kText, "ok or failed"},
       {"exit_code", kInteger, "exit status of the process"},
       {"wall_s", kNumber, "seconds from the start of the process to its end"},
       {"train_s", kNumber,
        "seconds from the first step to the last, of the rank that took longest"},
       {"steps", kInteger, "steps of all trainers together"},
       {"steps_per_s", kNumber, "steps / train_s"},
       {"rpc",
        kObject,
        "remote calls of the job, all ranks together",
        {{"calls", kInteger, "calls that were made"},
         {"bytes_out", kInteger, "bytes that were sent"},
         {"bytes_in", kInteger, "bytes that were received"}}},
       {"rss_mb", kNumber, "most memory of a rank, in MB"},
       {"live_rrefs", kInteger, "remote references that were never given back; 0 of a clean job"},
       {"live_contexts", kInteger, "autograd contexts that never ended; 0 of a clean job"},
       sometimes(or_null({"seed", kInteger, "as in start; of rank_end where rank 0 is elsewhere"})),
       sometimes(
           or_null({"config", kObject, "as in start; of rank_end where rank 0 is elsewhere"})),
       sometimes({"restarts", kInteger, "how often ranks were started again: --max-restarts"}),
       sometimes({"updates", kInteger,
                  "of parameters that ranks hold for others, in this run, all ranks together"}),
       sometimes(device_field()),
       sometimes({"device_mem_mb", kNumber, "most memory of tensors on a GPU, in MB"})}};
  append(event.fields, cause_fields());
  return event;
}

Field quality(Unit unit) {
  if (unit == Unit::kWords) return {"perplexity", kNumber, "e to the power of the loss"};
  return {"accuracy", kNumber, "share of the examples that are right"};
}

Event epoch_event(Unit unit) {
  const std::string what = counted(unit);
  Event event{"epoch",
              "at the end of an epoch, of each trainer",
              {{"epoch", kInteger, "from 1 on"},
               {"loss", kNumber, "mean over the epoch's steps; null if it had none"},
               {"steps", kInteger, "of this trainer in this epoch"},
               {what, kInteger, "that this trainer was trained on in this epoch"},
               {"wall_s", kNumber, "seconds that the epoch took"}}};
  if (unit == Unit::kWords) event.fields.push_back(quality(unit));
  return event;
}

Event lost_event() {
  return {"lost",
          "a trainer is lost, and the job goes on without it",
          {{"lost_rank", kInteger, "its rank"},
           {"lost_role", kText, "its role"},
           {"incarnation", kInteger, "processes that had the rank before it"},
           {"kind", kText, "kind of the error, as in peer_lost"},
           {"cause", kText, "what went wrong, in a line"},
           {"steps_made", kInteger, "steps that it has made in all"},
           {"steps_back", kInteger, "steps that it had begun, which go to the others"},
           {"steps_in_doubt", kInteger,
            "of those: may have been made, as no parameters are on rank 0 that would tell"},
           {"trainers_left", kInteger, "trainers that are there"}}};
}

Event returned_event() {
  return {"returned",
          "a new process takes the place of a trainer that was lost",
          {{"returned_rank", kInteger, "its rank"},
           {"returned_role", kText, "its role"},
           {"incarnation", kInteger, "processes that had the rank before it"}}};
}

}  // namespace

const char* counted(Unit unit) { return unit == Unit::kWords ? "words" : "samples"; }

Json fields_of(const Evaluation& evaluation, Unit unit) {
  if (evaluation.samples == 0) return Json::object();
  Json fields{{"loss", evaluation.loss()}};
  if (unit == Unit::kWords) {
    fields["perplexity"] = std::exp(evaluation.loss());
  } else {
    fields["accuracy"] = evaluation.accuracy();
  }
  fields[counted(unit)] = evaluation.samples;
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
  Event rank_end = end_event();
  rank_end.name = "rank_end";
  rank_end.when = "the last line of a rank that the launcher started: its own figures";
  return {
      {"start",
       "the first line of each rank",
       {or_null({"world_size", kInteger, "ranks of the job; null where rank 0 is yet to tell it"}),
        {"pid", kInteger, "process of the rank"},
        {"host", kText, "where it runs"},
        {"version", kText, "of distrain"},
        {"torch", kText, "version of LibTorch"},
        or_null({"seed", kInteger, "of all random numbers; null where rank 0 is yet to tell it"}),
        {"threads", kInteger, "threads of one operation, until `ready` says how many"},
        or_null(device_field()),
        {"transport", kText, "between the ranks, as the options ask for it"},
        {"trust", kText,
         "who is let in as a rank: token (who knows it), user (this one's processes on this host) "
         "or anybody"},
        or_null({"data", kText,
                 "what the job trains on: the path in --data or, without a path, what is made up: "
                 "teacher, random batches, labels or images; null if the job has no data, or if "
                 "rank 0 has not sent it yet"}),
        {"config", kObject, "the job's options; null where rank 0 is yet to tell them"}}},
      {"waiting",
       "every 5 s while ranks are missing, or while all are there and one more is to be any of "
       "them",
       {{"missing", kIntegers, "ranks that have not joined, or not reached all others"},
        sometimes({"address", kText, "where rank 0 is expected"}),
        sometimes({"reason", kText, "why rank 0 could not be reached, or has no place"})}},
      {"ready",
       "when all ranks are there",
       {{"world_size", kInteger, "ranks of the job"},
        {"transport", kText, "between this rank and the others"},
        {"threads", kInteger, "threads of one operation: CPUs by the ranks that share them"},
        {"startup_s", kNumber, "seconds since the job was started"},
        sometimes(device_field())}},
      {"ddp",
       "how trainers on GPUs average their gradients",
       {{"ddp", kText, "staged (over the CPU) or nccl"}}},
      {"checkpoint",
       "when one was saved or loaded",
       {{"action", kText, "saved or loaded"},
        {"path", kText, "its folder"},
        {"step", kInteger, "steps, batches or episodes that had been made"},
        {"wall_s", kNumber, "seconds that it took"},
        sometimes({"held_s", kNumber, "seconds of these that the job stood still; when saved"})}},
      {"restart",
       "when the launcher starts ranks again (--max-restarts)",
       {{"ranks", kIntegers, "which: all of its own, or a trainer that the job goes on without"},
        or_null(
            {"generation", kInteger, "how often all have then; null where rank 0 is elsewhere"}),
        {"restarts_left", kInteger, "how often it still may"},
        or_null({"checkpoint", kText,
                 "the newest; null: none, rank 0 is elsewhere, or one trainer starts again"}),
        {"after_s", kNumber, "seconds that it waits before"},
        {"kind", kText, "kind of the error that ended them, as in peer_lost"},
        {"cause", kText, "what went wrong, in a line"},
        or_null({"cause_rank", kInteger, "rank where it went wrong"})}},
      {"warn",
       "something to know of; the job goes on",
       {{"kind", kText, "kind of the trouble"}, {"message", kText, "in a line"}}},
      {"error",
       "what failed, by each rank that notices",
       {{"kind", kText, "kind of the error, as in peer_lost"},
        {"message", kText, "what went wrong, in a line"},
        or_null({"cause_rank", kInteger, "rank where it went wrong"}),
        or_null({"op", kText, "the operation that failed"}),
        {"elapsed_s", kNumber, "seconds since the job was started"},
        {"exit_code", kInteger, "exit status that belongs to the kind"}}},
      std::move(rank_end),
      end_event(),
  };
}

Event step_event(std::vector<Field> more) {
  Event event{"step",
              "after a step of a trainer, as --log-interval says",
              {{"epoch", kInteger, "from 1 on"},
               {"step", kInteger, "of this trainer, from 1 on; those before a resume count"},
               {"loss", kNumber, "of the step's batch"},
               {"lr", kNumber, "learning rate that the step used"}}};
  append(event.fields, std::move(more));
  return event;
}

Event eval_event(std::string when, Unit unit) {
  return {"eval",
          std::move(when),
          {{"set", kText, "valid (of each epoch) or test (at the end)"},
           {"epoch", kInteger, "that has ended, or in which the job did"},
           {"step", kInteger, "of each trainer, from 1 on"},
           {"loss", kNumber, "mean over all that was evaluated"},
           quality(unit),
           {counted(unit), kInteger, "how many were evaluated"},
           sometimes({"lr", kNumber, "learning rate until now, where it follows from losses"})}};
}

std::vector<Event> trainer_events(bool may_lose, Unit unit) {
  const std::string what = counted(unit);
  Event eval = eval_event("at the end of an epoch, or of the job", unit);
  Event end{
      "end",
      "",
      {sometimes({"loss", kNumber, "mean over the last epoch, and over the trainers"}),
       sometimes(quality(unit)), sometimes({"eval", kObject, "the last evaluation", eval.fields}),
       sometimes({"ddp", kText, "how trainers on GPUs average: staged or nccl"})}};
  end.fields[1].what = unit == Unit::kWords ? "of that loss" : "of the last evaluation";
  std::vector<Event> events{
      step_event({{what + "_per_s", kNumber, what + " of this trainer a second"}}),
      epoch_event(unit), std::move(eval)};
  if (may_lose) {
    events.push_back(lost_event());
    events.push_back(returned_event());
    end.fields.push_back(
        sometimes({"lost", kInteger, "trainers that were lost, where the job can go on without"}));
  }
  events.push_back(std::move(end));
  return events;
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
