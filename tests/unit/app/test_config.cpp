// Tests the files of --config, the origins of values, and durations of a user's own job.
#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "../src/app/program.h"
#include "distrain/job/definition.h"
#include "support/catch.h"
#include "support/scenario_data.h"

using namespace distrain;
using namespace distrain::app;

namespace {

struct OwnOptions : job::TrainerOptions {
  double pause_s = 1.5;
  bool shuffle = true;
  std::string name;
  std::vector<std::string> tags;
  std::vector<int64_t> sizes = {1};

  static void describe(job::OptionList<OwnOptions>& list) {
    list.duration("pause", &OwnOptions::pause_s, "wait for TIME").above(0, 1000).formerly("sleep");
    list.flag("shuffle", &OwnOptions::shuffle, "shuffle the data");
    list.text("name", &OwnOptions::name, "NAME", "call it NAME");
    list.text("tags", &OwnOptions::tags, "TAG[,...]", "give it tags");
    list.integers("sizes", &OwnOptions::sizes, "use these sizes").range(1, 9);
  }
};

const std::vector<JobCommand> kOwnJobs = {
    job::define<OwnOptions>("own", "").role("trainer", &OwnOptions::trainers)};
const Program kOwnProgram{"own", kOwnJobs, {}};

/// Reads `text` as the file "c" of --config, after the command line `args`.
ParsedOptions configured(const std::string& text, std::vector<std::string> args = {}) {
  const testing::Folder folder;
  const std::string path = folder.path() + "/c";
  std::ofstream(path) << text;
  args.insert(args.end(), {"--config", path});
  ParsedOptions options = parse_options(kOwnJobs[0].table, args);
  read_config(options, &kOwnProgram, nullptr);
  return options;
}

/// Returns the error for a file, without the folder of the file.
std::string error_of(const std::string& text, const std::vector<std::string>& args = {}) {
  try {
    configured(text, args);
  } catch (const base::Exception& e) {
    CHECK(e.kind() == base::ErrorKind::kInvalid);
    const std::string& message = e.error().message;
    return message.substr(std::min(message.size(), message.find("/c:") + 1));
  }
  return "accepted";
}

}  // namespace

TEST_CASE("a file sets options, and the command line wins over it") {
  const ParsedOptions options = configured(
      "\xEF\xBB\xBF# a comment\r\n"
      "lr = 0.5  # another\r\n"
      "batch_size = 7\n\n  trainers=3\n"
      "name = \"a # b, 'c'\"\n"
      "tags = [ \"x\" , \"y z\",  # the first two\n  'w' ]\n"
      "sizes = [1, 2]\n"
      "shuffle = false\nspawn = false\n"
      "sleep = \"50ms\"\n",
      {"--lr=0.25"});
  CHECK(options.real("lr") == 0.25);
  CHECK(options.integer("batch-size") == 7);
  CHECK(options.integer("trainers") == 3);
  CHECK(options.text("name") == "a # b, 'c'");
  CHECK(options.text("tags") == "x,y z,w");
  CHECK(options.text("sizes") == "1,2");
  CHECK(options.text("pause") == "0.05");
  CHECK(options.given("batch-size"));
  CHECK(options.given("shuffle"));  // its default is true
  CHECK_FALSE(options.flag("shuffle"));
  CHECK_FALSE(options.given("spawn"));
  CHECK(options.origin("lr") == "command line");
  CHECK(options.origin("batch-size").starts_with("config file "));
  CHECK(options.origin("momentum") == "default");
}

TEST_CASE("a flag of the file is reset on the command line") {
  CHECK(configured("quiet = true").flag("quiet"));
  CHECK_FALSE(configured("quiet = true", {"--quiet=false"}).flag("quiet"));
  CHECK_FALSE(configured("quiet = true", {"-q", "--quiet=false"}).given("quiet"));
  CHECK(configured("quiet = false", {"--quiet=false", "--quiet"}).flag("quiet"));
}

TEST_CASE("a mistake in a file is refused with its line") {
  CHECK(error_of("lr = 1\n\nlrr = 2") == "c:3: unknown option 'lrr'; did you mean --lr?");
  CHECK(error_of("zzz = 2") == "c:1: unknown option 'zzz'; see own --help");
  CHECK(error_of("lr = \"fast\"") == "c:1: lr must be a number from 0 to 1000000, not 'fast'");
  CHECK(error_of("trainers = 2.5") ==
        "c:1: trainers must be a whole number from 1 to 1022, not '2.5'");
  CHECK(error_of("trainers = [2, 3]") == "c:1: trainers takes one value, not '2,3'");
  CHECK(error_of("lr =") == "c:1: lr must be a number from 0 to 1000000, not ''");
  CHECK(error_of("name = \"\"") == "c:1: name needs a value: NAME");
  CHECK(error_of("quiet = 1") == "c:1: quiet must be true or false, not '1'");
  CHECK(error_of("pause = \"1x\"") ==
        "c:1: pause must be a time above 0 and up to 1000 s, such as 60, 50ms, 5m or 2h, not '1x'");
  for (const char* line : {"quiet", "x", "[own]", "[[own]]", "own.lr = 1", "[lr = 1]", ";"}) {
    CAPTURE(line);
    CHECK(error_of(line) ==
          "c:1: expected NAME = VALUE, without sections, not '" + std::string(line) + "'");
  }
  CHECK(error_of("= 1").starts_with("c:1: unknown option ''"));
  CHECK(error_of("lr = 1\nlr = 1") == "c:2: lr is set in line 1 already");
  CHECK(error_of("pause = 1\nsleep = 1", {"--pause=1"}) == "c:2: sleep is set in line 1 already");
  CHECK(error_of("sizes = [1,\n2,\n\nlr = 1") == "c:1: a list has no closing ]");
  CHECK(error_of("sizes = [1,\n2, \"x]") == "c:2: a text has no closing \"");
  CHECK(error_of("name = \"a\\\"b\"") == "c:1: a text cannot have a backslash");
  for (const char* name : {"config", "print-config", "dry_run", "help", "version"}) {
    std::string option = name;
    std::ranges::replace(option, '_', '-');
    CHECK(error_of(std::string(name) + " = true") ==
          "c:1: give --" + option + " on the command line");
  }
  CHECK(error_of(std::string("lr = 1\0", 7)).ends_with(": is not a text file of at most 1 MiB"));
  CHECK(error_of(std::string((1 << 20) + 1, '\n')).ends_with("of at most 1 MiB"));
  CHECK(error_of(std::string(1 << 20, '\n')) == "accepted");
}

TEST_CASE("the printed file sets the same values") {
  const ParsedOptions given = configured("tags = ['a b', \"c\"]\nsizes = [3, 4]\nshuffle = false",
                                         {"--name", "say \"hi\"", "--pause=2m", "--lr", "1e-7"});
  const std::string text = config_file(given, false);
  CHECK(text.find("\n# momentum = 0.0                  # default\n") != std::string::npos);
  CHECK(text.find("\n# name = \"say \\\"hi\\\"\"") !=
        std::string::npos);  // what a file cannot have
  const ParsedOptions read = configured(text);
  for (const job::Option& option : kOwnJobs[0].table) {
    if (option.name == "name" || option.name == "config") continue;
    CAPTURE(option.name);
    CHECK(read.text(option.name) == given.text(option.name));
    CHECK(read.given(option.name) == given.given(option.name));
  }
}

TEST_CASE("the origin of each value is known") {
  ParsedOptions options = parse_options(kOwnJobs[0].table, {"--steps", "5"});
  options.take("momentum", "0.5", "checkpoint saved/step-1");
  options.derive("trainers", "4");
  kOwnJobs[0].definition->complete(options);
  CHECK(options.origin("steps") == "command line");
  CHECK(options.origin("epochs") == "derived");  // 0, because --steps is the limit
  CHECK(options.origin("momentum") == "checkpoint saved/step-1");
  CHECK(options.origin("trainers") == "derived");
  CHECK(options.origin("lr") == "default");
  const Json fields = config_fields(options, true);
  CHECK(fields["config"]["lr"].is_null());
  CHECK(fields["origins"]["lr"] == "rank 0");
  CHECK(fields["config"]["steps"] == 5);
  CHECK(fields["config"]["rpc_timeout"] == 60.0);
}
