// What a program says of itself: help, man pages, completions, schema.
#include <string>

#include "../src/app/options.h"
#include "../src/app/placement.h"
#include "../src/app/process/json_lines.h"
#include "distrain/app/program.h"
#include "distrain/job/definition.h"
#include "support/catch.h"
#include "support/event_check.h"

using namespace distrain;
using namespace distrain::app;
using job::Json;

namespace {

struct Options {
  int rows_per_rank = 100;
  std::string tower = "deep", clicks;

  static void describe(job::OptionList<Options>& list) {
    list.integer("rows-per-rank", &Options::rows_per_rank, "rows [of a table]")
        .range(1, 1000)
        .details("See --clicks and `more`.");
    list.choice("tower", &Options::tower, {"deep", "wide"}, "which one");
    list.text("clicks", &Options::clicks, "FILE", "the user's data");
  }
};

job::Definition<Options> clicks() {
  return job::define<Options>("clicks", "learns what is clicked")
      .describe("Two towers.")
      .details("Rows are 'sparse'.\n\n    a.b\n\n* term: what it is")
      .example("shop clicks --rows 3", "A small table")
      .events({job::step_event({{"clicks_per_s", job::FieldType::kNumber, "clicks a second"}}),
               {"end", "", {job::sometimes({"auc", job::FieldType::kNumber, "of the test set"})}}})
      .role("trainer", 2);
}

const std::vector<JobCommand> kCommands = {clicks()};
const Program kShop{"shop", kCommands, {"sells things", "Trains the shop's models.", {}}};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// A line's schema.
Json schema_of(const std::string& event) { return Json::parse(schema(kShop, event))["oneOf"]; }

}  // namespace

TEST_CASE("a program's texts are its own") {
  for (const TextCommand& command : text_commands(kShop)) {
    for (const std::string& choice : command.choices) {
      const std::string text = command.text(kShop, choice);
      CAPTURE(command.name, choice);
      CHECK(has(text, "shop"));
      CHECK_FALSE(has(text, "hybrid"));
    }
    CHECK(has(help_text(kShop, command), "Usage: shop " + command.name));
  }
  CHECK(has(man_page(kShop), "\\fBshop\\-clicks\\fR(1)"));
}

TEST_CASE("a man page has options, their details, lines and examples as roff") {
  const std::string page = man_page(kShop, kCommands[0]);
  CHECK(has(page, ".TH SHOP-CLICKS 1 "));
  CHECK(has(page,
            ".TP\n\\fB\\-\\-rows\\-per\\-rank\\fR \\fIN\\fR\nrows [of a table] (default: 100).\n"
            "See \\fB\\-\\-clicks\\fR and \\fBmore\\fR.\n"));
  CHECK(has(page, ".PP\n.RS 4\n.nf\na.b\n.fi\n.RE\n.TP\n\\fBterm\\fR\nwhat it is\n"));
  CHECK(has(page, "\\fBclicks_per_s\\fR\nclicks a second\n"));
  CHECK(has(page, "A small table:\n.PP\n.RS 4\n.nf\nshop clicks \\-\\-rows 3\n"));
  CHECK_FALSE(has(page, "dump\\-placement"));  // it is hidden
}

TEST_CASE("completions quote what a shell would take for its own") {
  CHECK(has(completion(kShop, "zsh"), "'--rows-per-rank[rows [of a table\\]]:value: '"));
  CHECK(has(completion(kShop, "zsh"), "'--clicks[the user'\\''s data]:value:_files'"));
  CHECK(has(completion(kShop, "fish"), "-r -F -l clicks -d 'the user\\'s data'"));
  CHECK(has(completion(kShop, "bash"),
            "*/--tower)\n      mapfile -t COMPREPLY < <(compgen -W 'deep wide'"));
}

TEST_CASE("a program with one job is that job") {
  CHECK(has(help_text(kShop, kCommands[0]),
            "Usage: shop [OPTION]...\n       shop help|man|completion|schema\n\nTwo towers.\n\n"));
  CHECK(has(completion(kShop, "zsh"), "  $common_options \\\n"));
  CHECK_FALSE(has(completion(kShop, "fish"), "__fish_seen_subcommand_from clicks"));
}

TEST_CASE("the schema is closed and says what is always there") {
  const Json step = schema_of("step");
  REQUIRE(step.size() == 1);
  CHECK(step[0]["additionalProperties"] == false);
  CHECK(step[0]["properties"]["cmd"]["enum"] == Json::array({"clicks"}));
  CHECK(step[0]["properties"]["clicks_per_s"]["type"] == Json::array({"number", "null"}));
  CHECK(has(step[0]["required"].dump(), "clicks_per_s"));
  const Json end = schema_of("end");
  REQUIRE(end.size() == 2);  // of no job, and of the job
  CHECK(end[0]["properties"]["cmd"]["enum"] == Json::array({nullptr}));
  CHECK_FALSE(end[0]["properties"].contains("auc"));
  CHECK(schema_of("rank_end")[0]["properties"].contains("auc"));
  CHECK_FALSE(has(end[1]["required"].dump(), "auc"));
  const Json start = schema_of("start")[0]["properties"]["config"];
  CHECK(start["additionalProperties"] == false);
  CHECK(start["properties"]["rows_per_rank"]["type"] == Json::array({"integer", "null"}));
  CHECK_FALSE(start["properties"].contains("rank"));  // of a process alone
}

TEST_CASE("a line that nobody declares is refused") {
  const std::vector<job::Event> events = events_of(kCommands[0]);
  const Json good{{"epoch", 1}, {"step", 1}, {"loss", nullptr}, {"clicks_per_s", 2.5}};
  const auto refused = [&](const char* event, const Json& fields) {
    try {
      testing::check_declared(events, event, fields);
    } catch (const base::Exception& e) {
      return e.error().message;
    }
    return std::string();
  };
  CHECK(refused("step", good).empty());
  CHECK(has(refused("stride", good), "nobody declares it"));
  Json bad = good;
  bad["clicks"] = 3;
  CHECK(has(refused("step", bad), "nobody declares clicks"));
  bad = good;
  bad.erase("loss");
  CHECK(has(refused("step", bad), "it lacks loss"));
  bad = good;
  bad["step"] = 1.5;
  CHECK(has(refused("step", bad), "step has another type"));
}

TEST_CASE("a default folder of checkpoints can be switched off") {
  job::Option folder{.name = "checkpoint", .initial = "own"};
  CHECK_THROWS_WITH(canonical_value(folder, "", "--checkpoint"), "--checkpoint needs a value");
  folder.may_be_empty = true;
  CHECK(canonical_value(folder, "", "--checkpoint").empty());
  const job::OptionTable table = {folder};
  CHECK(job::ParsedOptions(table).adopting({{"checkpoint", ""}}).text("checkpoint").empty());
  folder.initial = "";  // nothing to switch off: a variable that is not set, perhaps
  CHECK_THROWS_WITH(canonical_value(folder, "", "--checkpoint"), "--checkpoint needs a value");
}

namespace {

struct Saving : job::TrainerOptions {
  Saving() { checkpoint.dir = "saves_of_this_job"; }
  static void describe(job::OptionList<Saving>&) {}
};

}  // namespace

TEST_CASE("a job's own default folder of checkpoints counts as one that the user gave") {
  const JobCommand command(
      job::define<Saving>("saving", "saves").role("trainer", &Saving::trainers));
  const auto check = [&](const std::vector<std::string>& args) {
    Placement placement;
    placement.ranks = {0, 1};
    placement.world_size = 2;
    check_options(parse_options(command.table, args), placement);
  };
  for (const std::string option : {"--checkpoint-every", "--keep", "--save-timeout"}) {
    check({option, "5"});
    CHECK_THROWS_WITH(check({"--checkpoint", "", option, "5"}), option + " needs --checkpoint");
  }
  check({"--resume", "auto"});
  CHECK_THROWS_WITH(check({"--checkpoint", "", "--resume", "auto"}),
                    "--resume auto needs --checkpoint");
}

TEST_CASE("the end line adds up the updates of all ranks") {
  Summary summary;
  summary.add({{"updates", 3}, {"loss", 0.5}});
  summary.add({{"steps", 2}});
  summary.add({{"updates", 4}, {"loss", 0.25}});
  const Json fields = summary.end_fields(base::Clock::now(), std::nullopt);
  CHECK(fields["updates"] == 7);
  CHECK(fields["loss"] == 0.5);
}

TEST_CASE("what a rank derived from its own options does not outlive rank 0's") {
  job::Option mean{.name = "mean", .kind = job::ValueKind::kReal, .initial = "0.1", .max = 1};
  mean.each_own = true;
  const job::OptionTable table = {mean};
  job::ParsedOptions own(table);
  own.derive("mean", "0.3");
  CHECK(own.adopting({{"mean", ""}}).text("mean") == "0.1");
  CHECK(own.adopting({{"mean", "0.5"}}).text("mean") == "0.5");
  own.set("mean", "0.7");
  CHECK(own.adopting({{"mean", ""}}).text("mean") == "0.7");
}
