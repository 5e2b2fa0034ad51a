#include "process/display.h"

#include <limits>

#include <errno.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "distrain/base/process.h"
#include "process/output.h"

namespace distrain::app {
namespace {

constexpr auto kDrawInterval = std::chrono::milliseconds(100);
constexpr auto kTick = std::chrono::seconds(1);
constexpr auto kLineInterval = std::chrono::seconds(30);
constexpr size_t kMostWaiting = 1 << 16;  // bytes of lines that wait for the terminal
constexpr int kUnthinned = 20;  // lines of one kind that are shown before thin() limits them
constexpr char kYellow[] = "\x1b[33m", kGreen[] = "\x1b[32m", kCyan[] = "\x1b[36m";

/// Returns "1:02:03" or "0:07".
std::string clock_text(double seconds) {
  const auto all = static_cast<int64_t>(seconds);
  if (all < 3600) return fmt::format("{}:{:02}", all / 60, all % 60);
  return fmt::format("{}:{:02}:{:02}", all / 3600, all / 60 % 60, all % 60);
}

std::string counted(int64_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : what.ends_with("ch") ? "es" : "s");
}

double real_in(const Json& json, const char* name) { return number_in(json, name).value_or(0); }
int64_t integer_in(const Json& json, const char* name) { return int64_t(real_in(json, name)); }

/// Returns the loss of `event`. A null loss stands for NaN, which JSON does not have.
double loss_in(const Json& event) {
  return number_in(event, "loss").value_or(std::numeric_limits<double>::quiet_NaN());
}

/// Formats a value for a person: real numbers have 4 significant digits.
std::string text_of(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float()) return fmt::format("{:.4g}", value.get<double>());
  if (!value.is_array()) return value.dump(-1, ' ', false, Json::error_handler_t::replace);
  std::vector<std::string> texts;
  for (const Json& each : value) texts.push_back(text_of(each));
  return fmt::format("[{}]", fmt::join(texts, ", "));
}

/// Returns the event's fields, without those that all events have, as "name value" pairs. If
/// `of_eval`, also leaves out the fields that all `eval` events have.
std::string pairs_of(const Json& event, bool of_eval, const char* before = "  ") {
  static const std::set<std::string> kAll = {"v", "ts", "run", "event", "cmd", "rank", "role"};
  static const std::set<std::string> kEval = {"set",     "epoch", "step",     "loss", "lr",
                                              "samples", "words", "accuracy", "auc",  "perplexity"};
  std::string text;
  for (const auto& [name, value] : event.items()) {
    if (kAll.contains(name) || (of_eval && kEval.contains(name))) continue;
    text += before + name + ' ' + text_of(value);
  }
  return text;
}

std::string quality_in(const Json& fields, const char* before = "  ") {
  std::string text;
  if (const auto accuracy = number_in(fields, "accuracy")) {
    text += fmt::format("{}accuracy {:.2f} %", before, *accuracy * 100);
  }
  if (const auto auc = number_in(fields, "auc")) text += fmt::format("{}AUC {:.4f}", before, *auc);
  if (const auto perplexity = number_in(fields, "perplexity")) {
    text += fmt::format("{}perplexity {:.1f}", before, *perplexity);
  }
  const auto reward = number_in(fields, "running_reward");
  return reward ? text + fmt::format("{}running reward {:.1f}", before, *reward) : text;
}

/// Returns the number of columns of the terminal `fd`; 80 if unknown.
size_t columns_of(int fd) {
  winsize size{};
  ioctl(fd, TIOCGWINSZ, &size);
  return size.ws_col > 0 ? size.ws_col : 80;
}

/// Returns false if `fd` is this process's terminal and the process is in the background.
bool is_foreground(int fd) {
  const pid_t group = tcgetpgrp(fd);
  return group < 0 ? errno == ENOTTY : group == getpgrp();
}

/// Breaks `text` into lines of at most `width` columns, at separators or else between words.
std::string broken(std::string text, size_t width) {
  std::string lines;
  while (text.size() > width) {
    size_t end = text.rfind("  -  ", width);
    if (end == text.npos) end = text.rfind(' ', width);
    if (end + 1 < 3) end = text.find(' ', std::max<size_t>(width, 2));  // after a long first word
    if (end == text.npos) break;
    const bool is_separator = text.compare(end, 5, "  -  ") == 0;
    lines += text.substr(0, text.find_last_not_of(' ', end) + 1) + '\n';
    text.replace(0, is_separator ? end + 5 : text.find_first_not_of(' ', end), "  ");
  }
  return lines + text;
}

}  // namespace

Screen screen_of(const DisplayPlan& plan, OutputQueue& lines) {
  std::shared_ptr<OutputQueue> output(&lines, [](OutputQueue*) {});
  if (!plan.pretty) {
    // Open stderr anew, because O_NONBLOCK on descriptor 2 would also affect the shell's stderr.
    constexpr int kFlags = O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
    struct stat info {};
    const bool may_block =
        fstat(STDERR_FILENO, &info) == 0 && (S_ISCHR(info.st_mode) || S_ISFIFO(info.st_mode));
    const int own = may_block ? open("/proc/self/fd/2", kFlags) : -1;
    output = std::make_shared<OutputQueue>(own < 0 ? STDERR_FILENO : own);
  }
  const auto takes_all = [output] {
    return is_foreground(output->fd()) && output->pump() == 0 && output->empty() &&
           is_writable(output->fd());
  };
  const auto write = [output](std::string text) {
    output->push(std::move(text));
    output->pump();
  };
  return {.write = write,
          .is_free = [takes_all, keeps = plan.pretty] { return keeps || takes_all(); },
          .may_draw = takes_all,
          .width = [output] { return columns_of(output->fd()); }};
}

DisplayPlan plan_display(const std::string& progress, bool pretty, bool is_first, bool is_leader) {
  using enum DisplayPlan::Mode;
  DisplayPlan plan{.has_rank_0 = is_first};
  const bool out_is_terminal = isatty(STDOUT_FILENO);
  plan.pretty = pretty || (out_is_terminal && base::variable("DISTRAIN_PRETTY") == "1");
  plan.hint = is_leader && !plan.pretty;
  plan.on_terminal = isatty(plan.pretty ? STDOUT_FILENO : STDERR_FILENO);
  const std::string term = base::variable("TERM").value_or("");
  const bool draws = plan.on_terminal && is_leader && !term.empty() && term != "dumb";
  struct stat out {};
  const bool to_file =
      fstat(STDOUT_FILENO, &out) == 0 &&
      (S_ISREG(out.st_mode) || (S_ISCHR(out.st_mode) && out.st_rdev == makedev(1, 3)));
  plan.colours = draws && base::variable("NO_COLOR").value_or("").empty();
  if (progress == "plain") {
    plan.mode = kLines;
  } else if (plan.pretty) {
    plan.mode = draws && progress != "none" ? kFull : kLines;
  } else if (progress == "none" || !plan.on_terminal) {
    plan.mode = kNone;
  } else if (out_is_terminal || !(is_first || is_leader)) {
    plan.mode = kWarnings;
  } else {
    plan.mode = draws && to_file ? kFull : kLines;
  }
  return plan;
}

void Display::begin() {
  if (plan_.mode < Mode::kLines) return;
  const size_t width = plan_.on_terminal ? screen_.width() : std::string::npos;
  if (!plan_.header.empty()) stay(broken(plan_.header, width));
  show(true);
}

void Display::on_event(const Json& event) {
  if (!is_on() || is_over_ || !event.is_object()) return;
  const std::string name = text_in(event, "event");
  const int64_t rank = integer_in(event, "rank"), epoch = integer_in(event, "epoch");
  if (name == "warn") {
    Cause cause{.role = text_in(event, "role"), .message = text_in(event, "message")};
    if (number_in(event, "rank")) cause.rank = static_cast<int>(rank);
    if (said_.insert(cause.message).second) stay("warn: " + message_of(cause), kYellow);
  } else if (name == "lost") {
    Trainer& lost = trainers_[integer_in(event, "lost_rank")];
    lost.lost = true;
    lost.name = text_in(event, "lost_role");
    const std::string cause = text_in(event, "cause"), named = " is lost: ";
    const size_t at = cause.find(named);  // the shown line already names the rank
    stay(fmt::format("warn: {} lost ({}); others take over {}, {} left", lost.name,
                     cause.substr(at == cause.npos ? 0 : at + named.size()),
                     counted(integer_in(event, "steps_back"), "step"),
                     counted(integer_in(event, "trainers_left"), "trainer")),
         kYellow);
  } else if (name == "returned") {
    Trainer& back = trainers_[integer_in(event, "returned_rank")];
    back.lost = false;
    back.name = text_in(event, "returned_role");
    stay(back.name + " is back");
  } else if (name == "checkpoint") {
    const std::string path = text_in(event, "path");
    const bool is_saved = text_in(event, "action") == "saved";
    is_saved_ = is_saved_ || is_saved;
    end_epochs(false, true);
    if (is_saved) {
      thin(saves_, fmt::format(" saved {}  {:.2f} s", path, real_in(event, "wall_s")));
    } else if (plan_.mode != Mode::kWarnings) {
      stay(fmt::format(" goes on from {}, step {}", path, integer_in(event, "step")));
    }
  } else if (name == "waiting") {
    if (rank != 0 && !missing_.empty() && missing_ != "0") return;  // rank 0 has named the missing
    missing_ = fmt::format("{}", fmt::join(event.value("missing", std::vector<int>()), ","));
    reason_ = text_in(event, "reason");
    if (const std::string address = text_in(event, "address"); !address.empty()) address_ = address;
    const bool is_new = said_.insert(missing_ + reason_).second;
    const bool shows =
        plan_.mode == Mode::kLines || (plan_.mode == Mode::kWarnings && plan_.pretty);
    if (shows && is_new && !is_ready_) stay(waiting(std::string::npos));
  } else if (name == "ready") {
    is_ready_ = true;
  } else if (plan_.mode == Mode::kWarnings) {
    return;
  } else if (name == kProgress) {
    on_progress(event);
  } else if (name == "restart") {
    const auto ranks = event.value("ranks", std::vector<int>());
    const bool of_all = std::ranges::all_of(
        trainers_, [&](auto& each) { return std::ranges::count(ranks, each.first) > 0; });
    if (of_all) {  // otherwise only a lost trainer starts again, and the others continue
      ended_ = epoch_ = 0;
      pending_.clear();
      trainers_.clear();
      trained_since_ = {};
    }
  } else if (name == "epoch" && epoch > ended_) {
    Epoch& its = pending_[epoch];
    its.ranks.insert(rank);
    const double steps = real_in(event, "steps");
    if (steps > 0) its.loss += loss_in(event) * steps;
    its.steps += steps;
    its.seconds = std::max(its.seconds, real_in(event, "wall_s"));
    its.is_partial = event.value("partial", false);
    end_epochs(false);
  } else if (name == "eval") {
    const std::string words = fmt::format("{} {:.4f}{}{}", text_in(event, "set"), loss_in(event),
                                          quality_in(event), pairs_of(event, true));
    if (text_in(event, "set") == "valid" && epoch > ended_) {
      pending_[epoch].evaluation = words;
      end_epochs(false);
    } else {
      end_epochs(true);
      stay(" " + words);
    }
  } else if (name == "split") {
    stay(fmt::format(" {}  {:.2f} s a batch  loss {:.4f}",
                     counted(integer_in(event, "num_split"), "micro-batch"),
                     real_in(event, "batch_s"), loss_in(event)));
  } else if (name == "episode") {
    stay(fmt::format(" episode {}{}", integer_in(event, "episode"), quality_in(event)));
  } else if (name == "text") {
    end_epochs(true);
    stay(" text  " + text_in(event, "text"));
  } else if (plan_.pretty) {
    static const std::set<std::string> kKnown = {"start", "step",  "rank_end", "error",
                                                 "ddp",   "epoch", "restart",  "end"};
    if (!kKnown.contains(name)) stay((name == "prediction" ? "" : name) + pairs_of(event, false));
  }
  show(false);
}

void Display::on_progress(const Json& event) {
  if (const std::string note = text_in(event, "note"); !note.empty()) {
    if (said_.insert(note).second) stay(note);
    return;
  }
  is_ready_ = true;
  Trainer& its = trainers_[integer_in(event, "rank")];
  its.step = integer_in(event, "step");
  if (!its.first) its.first = its.step;
  if (its.name.empty()) its.name = text_in(event, "role");
  its.steps = integer_in(event, "steps");
  its.lost = false;
  epoch_ = std::max(epoch_, integer_in(event, "epoch"));
  epochs_ = integer_in(event, "epochs");
  count_ = plan_.address.empty() ? integer_in(event, "processes") : 1;
  trainers_of_job_ = integer_in(event, "trainers");
  if (const auto loss = number_in(event, "loss")) loss_ = loss;
  quality_ = quality_in(event);
  if (const auto n = integer_in(event, "num_split")) quality_ = "  " + counted(n, "micro-batch");
  if (trained_since_ == base::TimePoint{}) trained_since_ = screen_.now();
  end_epochs(false);
}

/// Writes the lines of pending epochs, oldest first, while two of the three `signs` show that the
/// oldest is complete, or two newer epochs are pending. If `all`, writes all lines. `is_next`: the
/// job has passed the newest epoch's evaluation.
void Display::end_epochs(bool all, bool is_next) {
  const auto lost = std::ranges::count_if(trainers_, [](auto& each) { return each.second.lost; });
  while (!pending_.empty()) {
    const int64_t number = pending_.begin()->first;
    const Epoch& epoch = pending_.begin()->second;
    const bool by_all = std::ssize(epoch.ranks) + lost >= count();
    const bool is_over = is_next || epoch_ > number || pending_.size() > 1;
    const int signs = by_all + is_over + !epoch.evaluation.empty();  // that the epoch is complete
    if (!all && signs < 2 && pending_.size() < 3) return;
    std::string line = fmt::format(" epoch {}", number);
    if (epochs_ > 0) line += fmt::format("/{}", epochs_);
    if (epoch.is_partial) {
      const auto of_each = static_cast<int64_t>(epoch.steps) / std::ssize(epoch.ranks);
      line = " " + counted(of_each, "step") + " of" + line;
    }
    if (epoch.steps > 0) line += fmt::format("  loss {:.4f}", epoch.loss / epoch.steps);
    if (!epoch.evaluation.empty()) line += "  " + epoch.evaluation;
    if (epoch.steps > 0) line += fmt::format("  {:.2f} s", epoch.seconds);
    thin(epoch_lines_, line);
    ended_ = number;
    pending_.erase(pending_.begin());
  }
  if (all && !epoch_lines_.held.empty()) stay(std::exchange(epoch_lines_.held, {}));
}

// ---- output ----

void Display::stay(const std::string& line, const char* colour) {
  if (lines_.size() < kMostWaiting) lines_ += coloured(colour, line) + '\n';
  line_at_ = screen_.now();
  show(true);
}

/// Writes the first lines of a kind, then at most one a second. Keeps the newest unwritten line.
void Display::thin(Thinned& kind, const std::string& line) {
  const base::TimePoint now = screen_.now();
  kind.held = line;
  if (plan_.mode == Mode::kWarnings) return;
  if (kind.shown >= kUnthinned && now - kind.at < kTick) return;
  ++kind.shown;
  kind.at = now;
  stay(std::exchange(kind.held, {}));
}

/// Describes the wait for ranks. If the text is too long, drops the address, then the reason's end.
std::string Display::waiting(size_t width) const {
  const double waited = since(begun_);
  if (address_.empty() && missing_.empty()) return "starting  " + clock_text(waited);
  const std::string noun = missing_.find(',') < missing_.npos ? "ranks " : "rank ";
  const std::string ranks = missing_.empty() ? "the other ranks" : noun + missing_;
  const std::string time = fmt::format(" ({:.0f} s)", waited), at = " at " + address_;
  std::string line = "waiting for " + ranks + (address_.empty() ? "" : at) + time;
  if (line.size() > width) line = ("waiting for " + ranks + time).substr(0, width);
  const std::string all = line + (reason_.empty() ? "" : ": " + reason_);
  if (all.size() <= width) return all;
  const size_t end = all.rfind(' ', std::max<size_t>(width, 4) - 4);
  return end > line.size() + 1 && end < all.npos ? all.substr(0, end) + " ..." : line;
}

std::string Display::status(size_t width) const {
  if (!is_ready_) return waiting(width);
  if (trainers_.empty()) return "running  " + clock_text(since(begun_));
  const double trained = since(trained_since_);
  const bool plays = quality_.starts_with("  running reward");  // rl: the total is unknown
  int64_t made = 0, here = 0, all = 0;
  for (const auto& [rank, its] : trainers_) {
    made += its.step;
    here += its.step - its.first.value_or(its.step);
    if (!plays) all = std::max(all, its.steps);
  }
  made = all > 0 ? std::min(made / count(), all) : made / count();  // per trainer
  const double rate = here > 0 ? static_cast<double>(here) / count() / trained : 0;
  // The parts of the line, in order. If it is too long, drop the parts with the highest numbers.
  std::vector<std::pair<int, std::string>> parts;
  if (epochs_ > 1) parts.emplace_back(3, fmt::format("epoch {}/{}", epoch_, epochs_));
  if (all > 0) parts.emplace_back(1, fmt::format("{:2} %", made * 100 / all));
  const std::string of_all = all > 0 ? fmt::format("/{}", all) : "";
  const char* const what = plays ? "episode " : all > 0 ? "" : "step ";
  parts.emplace_back(plays ? 1 : 2, what + std::to_string(made) + of_all);
  if (loss_) parts.emplace_back(0, fmt::format("loss {:.{}f}", *loss_, plays ? 2 : 4));
  if (!quality_.empty()) parts.emplace_back(plays ? 2 : 4, quality_.substr(plays ? 10 : 2));
  if (rate > 0) parts.emplace_back(6, fmt::format("{:.{}f}/s", rate, rate < 10 ? 1 : 0));
  std::string time = clock_text(trained);
  if (all > 0 && rate > 0) time += "<" + clock_text(static_cast<double>(all - made) / rate);
  parts.emplace_back(5, time);
  const auto line = [&parts] {
    std::string text;
    for (const auto& [order, part] : parts) text += (text.empty() ? "" : "  ") + part;
    return text;
  };
  const size_t whole = parts.size();
  while (line().size() > width && parts.size() > 1) parts.erase(std::ranges::max_element(parts));
  const size_t length = line().size();
  if (all > 0 && parts.size() == whole && length + 10 <= width) {
    const size_t bar = std::min<size_t>(width - length - 4, 20);
    const std::string done(bar * static_cast<size_t>(made) / static_cast<size_t>(all), '#');
    parts.emplace(parts.begin() + (epochs_ > 1 ? 1 : 0), 7, fmt::format("[{:.<{}}]", done, bar));
  }
  return line().substr(0, width);
}

/// Returns a line with all trainers, or, if that is too long, with the lost and slowest trainers.
std::string Display::ranks(size_t width) const {
  std::vector<std::string> all, few;
  const Trainer* slowest = nullptr;
  for (const auto& [rank, its] : trainers_) {
    all.push_back(fmt::format("{} {}{}", its.name, its.lost ? "lost at step " : "", its.step));
    if (its.lost) few.push_back("lost " + its.name);
    if (!its.lost && (!slowest || its.step < slowest->step)) slowest = &its;
  }
  if (slowest) few.push_back(fmt::format("slowest {} {}", slowest->name, slowest->step));
  const std::string line = fmt::format("{}", fmt::join(all, "    "));
  return line.size() <= width ? line : fmt::format("{}", fmt::join(few, "  ")).substr(0, width);
}

/// Returns the text that erases the live region, whose lines wrap if the terminal became narrower.
std::string Display::erased() {
  if (drawn_.empty()) return {};
  const size_t width = std::max<size_t>(screen_.width(), 1);
  size_t rows = 0;
  for (const size_t length : drawn_) rows += (length + width - 1) / width;
  drawn_.clear();
  return rows > 1 ? fmt::format("\r\x1b[{}A\x1b[J", rows - 1) : "\r\x1b[J";
}

void Display::show(bool at_once) {
  if (!at_once && screen_.now() - shown_ < kDrawInterval) return;
  if (!screen_.is_free()) return;
  shown_ = screen_.now();
  const bool draws = plan_.mode == Mode::kFull && !is_over_ && screen_.may_draw();
  if (!draws && lines_.empty()) return;
  std::string text = erased() + std::exchange(lines_, {});
  if (draws) {
    const size_t width = std::max<size_t>(screen_.width(), 4) - 3;  // room for Ctrl-C's echo
    const std::string first = status(width), second = trainers_.size() > 1 ? ranks(width) : "";
    text += coloured(kCyan, first) + (second.empty() ? "" : '\n' + second);
    drawn_ = {first.size(), second.size()};
  }
  screen_.write(std::move(text));
}

base::TimePoint Display::next_tick() const {
  if (is_over_ || plan_.mode < Mode::kLines) return base::kNever;
  return plan_.mode == Mode::kFull ? shown_ + kTick : line_at_ + kLineInterval;
}

void Display::tick() {
  if (screen_.now() < next_tick()) return;
  if (plan_.mode == Mode::kLines) stay(" " + status(79));
  shown_ = screen_.now();  // even if show() does not draw, so that next_tick() advances
  show(true);
}

void Display::finish(const Json& end) {
  if (!is_on() || is_over_) return;
  const bool lasts = plan_.mode >= Mode::kLines;
  const bool is_ok = text_in(end, "status") == "ok";
  const bool is_cancelled = text_in(end, "kind") == "cancelled";
  const bool by_signal = plan_.has_rank_0 && is_cancelled;
  if (lasts) end_epochs(true);
  if (!saves_.held.empty() && (lasts || by_signal)) stay(saves_.held);
  is_over_ = true;
  is_told_ = by_signal && screen_.is_free() && (!plan_.pretty || plan_.on_terminal);
  std::string figures;
  if (end.contains("steps")) figures = counted(integer_in(end, "steps"), "step");
  if (end.contains("predicted")) figures = counted(integer_in(end, "predicted"), "example");
  if (trainers_of_job_ > 1 && text_in(end, "scope") != "rank") {
    figures += fmt::format(" of {} trainers", trainers_of_job_);
  }
  if (const auto wall = number_in(end, "wall_s")) figures += fmt::format(" in {:.2f} s", *wall);
  if (const auto loss = number_in(end, "loss")) loss_ = loss;
  if (loss_) figures += fmt::format(", loss {:.4f}", *loss_);
  std::string quality = quality_in(end, ", ");
  if (quality.empty() && quality_.starts_with("  running")) quality = ", " + quality_.substr(2);
  figures += quality + pairs_of(end.value("eval", Json::object()), true, ", ");
  const bool waits = is_cancelled && !is_ready_ && !(address_.empty() && missing_.empty());
  if (waits && (lasts || by_signal)) stay("stopped while " + waiting(std::string::npos), kYellow);
  if (is_ok && lasts) {
    stay("done: " + figures, kGreen);
  } else if (by_signal && !plan_.to_go_on.empty() && is_saved_) {
    stay(fmt::format("stopped: {}; to go on:", figures), kYellow);
    stay("  " + plan_.to_go_on);
  } else if (by_signal) {
    const char* const why = plan_.to_go_on.empty() ? ": no --checkpoint" : " yet";
    stay(fmt::format("nothing saved{}; {}", why, figures), kYellow);
  }
  if (plan_.mode == Mode::kWarnings && plan_.hint && is_ok) {
    stay("hint: --pretty prints lines for people in place of JSON");
  }
  show(true);
  clear();
}

}  // namespace distrain::app
