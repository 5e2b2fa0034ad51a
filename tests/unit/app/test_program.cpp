// Tests the texts that a program generates: help, man pages, completions, schema.
#include <string>

#include "../src/app/placement.h"
#include "../src/app/process/output.h"
#include "../src/app/program.h"
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
const std::vector<JobCommand> kTwoCommands = {clicks(),
                                              job::define<Options>("views", "").role("trainer", 2)};
const Program kMall{"shop", kTwoCommands, kShop.about};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Returns the JSON schema of the lines of `event`.
Json schema_of(const std::string& event) { return Json::parse(schema(kShop, event))["oneOf"]; }

}  // namespace

TEST_CASE("the texts of a program name that program") {
  for (const TextCommand& command : text_commands(kMall)) {
    for (const std::string& choice : command.choices) {
      const std::string text = command.text(kMall, choice);
      CAPTURE(command.name, choice);
      CHECK(has(text, "shop"));
      CHECK_FALSE(has(text, "hybrid"));
    }
    CHECK(has(help_text(kMall, command), "Usage: shop " + command.name));
  }
  CHECK(has(man_page(kMall), "\\fBshop\\-clicks\\fR(1)"));
}

TEST_CASE("a man page has options, their details, lines and examples as roff") {
  const std::string page = man_page(kMall, kTwoCommands[0]);
  CHECK(has(page, ".TH SHOP-CLICKS 1 "));
  CHECK(has(page,
            ".TP\n\\fB\\-\\-rows\\-per\\-rank\\fR \\fIN\\fR\nrows [of a table] (default: 100).\n"
            "See \\fB\\-\\-clicks\\fR and \\fBmore\\fR.\n"));
  CHECK(has(page, ".PP\n.RS 4\n.nf\na.b\n.fi\n.RE\n.TP\n\\fBterm\\fR\nwhat it is\n"));
  CHECK(has(page, "\\fBclicks_per_s\\fR\nclicks a second\n"));
  CHECK(has(page, "A small table:\n.PP\n.RS 4\n.nf\nshop clicks \\-\\-rows 3\n"));
}

TEST_CASE("help and man pages of every command are printed, including those of help itself") {
  const TextCommand help = text_commands(kShop)[1], man = text_commands(kShop)[2];
  REQUIRE(help.name == "help");
  REQUIRE(man.name == "man");
  CHECK(help.choices ==
        std::vector<std::string>{"clicks", "report", "help", "man", "completion", "schema"});
  CHECK(man.choices == help.choices);
  CHECK(has(help.text(kShop, "man"), "Usage: shop man [COMMAND]\n"));
  CHECK(has(man.text(kShop, "schema"), ".TH SHOP-SCHEMA 1 "));
}

TEST_CASE("a program with one job has one man page, with its own summary and version") {
  const Program shop{"shop", kCommands, {"sells things", "Trains models.", {}, "1.2"}};
  const std::string page = man_page(shop);
  CHECK(has(page, ".TH SHOP 1 \"\" \"shop 1.2\""));
  CHECK(has(page, "shop \\- sells things\n.SH SYNOPSIS\n\\fBshop\\fR [\\fIoption\\fR]...\n"));
  CHECK(has(page, ".SH DESCRIPTION\nTrains models.\n.PP\nTwo towers.\n"));
  CHECK(has(page, "\\fB\\-\\-rows\\-per\\-rank\\fR"));
  CHECK(has(page, ".SH \"CHECKPOINTS\"\n"));
  CHECK(man_page(shop, kCommands[0]) == page);
  const Program bare{"shop", kCommands, {}};
  CHECK(has(man_page(bare), "shop \\- learns what is clicked\n"));
  CHECK(version_text(shop).starts_with("shop 1.2 (distrain "));
  CHECK(version_text(bare).starts_with("shop (distrain "));
  CHECK(version_text({"distrain", kCommands, {}}).starts_with("distrain "));
}

namespace {

struct Required {
  int rows = 0;
  std::string table;

  static void describe(job::OptionList<Required>& list) {
    list.integer("rows", &Required::rows, "rows of the table").range(1, 9).required();
    list.text("table", &Required::table, "NAME", "what it is called").required().may_change();
  }
};

}  // namespace

TEST_CASE("a required option must be given, unless a checkpoint or rank 0 supplies it") {
  const std::vector<JobCommand> commands = {job::define<Required>("fill", "").role("master", 1)};
  const auto check = [&](const std::vector<std::string>& args, Placement::Mode mode, int rank,
                         const std::map<std::string, std::string>& saved = {}) {
    ParsedOptions options = parse_options(commands[0].table, args);
    for (const auto& [name, value] : saved) options.take(name, value);
    commands[0].definition->complete(options);
    Placement placement;
    placement.mode = mode;
    placement.rank = rank;
    placement.ranks = {0};
    check_options(options, placement);
  };
  using enum Placement::Mode;
  for (const auto mode : {kSpawn, kLocal, kJoin}) {
    CHECK_THROWS_WITH(check({}, mode, 0), "--rows, --table must be given");
    CHECK_THROWS_WITH(check({"--rows=1"}, mode, 0), "--table must be given");
    CHECK_NOTHROW(check({"--rows", "1", "--table", "a"}, mode, 0));
  }
  CHECK_NOTHROW(check({}, kJoin, 1));
  CHECK_NOTHROW(check({"--table", "a"}, kSpawn, 0, {{"rows", "3"}}));
  CHECK_THROWS_WITH(check({"--rows", "2"}, kSpawn, 0, {{"table", ""}}), "--table must be given");

  const Program program{"fill", commands, {}};
  CHECK(has(help_text(program), "Usage: fill --rows N --table NAME [OPTION]...\n"));
  CHECK(has(help_text(program), "--rows N            rows of the table (required)\n"));
  CHECK(has(man_page(program), "\nrows of the table (required)\n"));
  CHECK(has(completion(program, "zsh"), "--rows[rows of the table (required)]"));
  CHECK(has(schema(program, "start"), "rows of the table (required)"));
}

namespace {

struct Again : job::TrainerOptions {
  static void describe(job::OptionList<Again>& list) {
    list.choice("mode", &Again::mode, {"sync"}, "again");
  }
};
template <int kind>
struct Wrong {
  int count = 1;
  static void describe(job::OptionList<Wrong>& list) {
    if (kind == 0) list.row("size").help("which is not there");
    if (kind != 0) list.integer(kind == 1 ? "threads" : "num_rows", &Wrong::count, "");
  }
};

template <class Options>
std::string mistake_of(const job::Definition<Options>& definition) {
  return JobCommand(definition).mistake;
}

}  // namespace

TEST_CASE("a mistake in the declaration of a job is reported at the start in one line") {
  CHECK(clicks().info().mistake.empty());
  CHECK(mistake_of(job::define<Again>("own", "").role("trainer", 2)) ==
        "--mode is declared twice: change the first one with list.row(), list.find() or "
        "list.without()");
  CHECK(mistake_of(job::define<Wrong<0>>("own", "").role("trainer", 2)) ==
        "no option is named size");
  CHECK(mistake_of(job::define<Wrong<1>>("own", "").role("trainer", 2)) ==
        "every job has an option --threads: rename the job's own");
  CHECK(mistake_of(job::define<Wrong<2>>("own", "").role("trainer", 2)) ==
        "declare --num_rows with '-': a user may write '_' for it");
  CHECK(mistake_of(job::define<Options>("own", "")) == "it has no role");
  CHECK(mistake_of(job::define<Options>("own", "").role("a", 1).role("a", 1)) ==
        "the role a: declared twice");
  CHECK(mistake_of(job::define<Options>("own", "").role("a", 0)) ==
        "the role a: it needs at least one rank");
  CHECK(mistake_of(job::define<Options>("own", "").metric("auc", "area").role("a", 1)) ==
        "the metric auc: eval lines are none of this job's");
  CHECK(mistake_of(job::define<Required>("own", "").role("a", &Required::rows)).empty());
  struct Silent : job::TrainerOptions {
    static void describe(job::OptionList<Silent>& list) { list.without("trainers"); }
  };
  CHECK(mistake_of(job::define<Silent>("own", "").role("trainer", &Silent::trainers)) ==
        "the role trainer: no option sets its number of ranks");
  CHECK(mistake_of(job::define<Silent>("own", "").metric("loss", "").role("trainer", 2)) ==
        "the metric loss: eval lines have a field of that name");
}

TEST_CASE("the help names only the update rules that a job offers") {
  struct Dense : job::TrainerOptions {
    static void describe(job::OptionList<Dense>& list) {
      list.find("optimizer").choices = {"sgd", "adamw", "rmsprop"};
    }
  };
  struct Sparse : job::TrainerOptions {
    static void describe(job::OptionList<Sparse>& list) {
      list.find("optimizer").choices = {"sgd", "adam"};
    }
  };
  struct Adaptive : job::TrainerOptions {
    static void describe(job::OptionList<Adaptive>& list) {
      list.find("optimizer").choices = {"adagrad"};
    }
  };
  const auto helps = [](const auto& definition) {
    const job::OptionTable& table = definition.info().table;
    return job::find_option(table, "momentum")->help + "; " +
           default_in_words(*job::find_option(table, "weight-decay"));
  };
  CHECK(helps(job::define<Dense>("own", "")) ==
        "set momentum for sgd and rmsprop; 0.01 for adamw, otherwise 0");
  CHECK(helps(job::define<Sparse>("own", "")) == "set momentum for sgd; 0");
  CHECK(helps(job::define<Adaptive>("own", "")) == "set momentum; 0");
}

TEST_CASE("messages name the option, its value and the allowed values") {
  const job::OptionTable& table = kCommands[0].table;
  const auto refused = [&](const std::vector<std::string>& args) {
    try {
      parse_options(table, args);
    } catch (const base::Exception& e) {
      return e.error().message;
    }
    return std::string();
  };
  CHECK(refused({"--rows_per_rank=x"}) ==
        "--rows-per-rank must be a whole number from 1 to 1000, not 'x'");
  CHECK(refused({"--rows-per-rank", "1001"}) ==
        "--rows-per-rank must be a whole number from 1 to 1000, not '1001'");
  CHECK(refused({"--rows-per-rank"}) ==
        "--rows-per-rank needs a value: a whole number from 1 to 1000");
  CHECK(refused({"--tower", "wdie"}) == "--tower must be one of deep, wide, not 'wdie'");
  CHECK(refused({"--tower", "wid"}) ==
        "--tower must be one of deep, wide, not 'wid'; did you mean wide?");
  CHECK(refused({"--tower=", "deep"}) == "--tower needs a value: one of deep, wide");
  CHECK(refused({"--clicks", "--quiet"}) == "--clicks needs a value: FILE");
  CHECK(refused({"--rpc-timeout", "0"}) ==
        "--rpc-timeout must be a time above 0 and up to 1000000 s, such as 60, 50ms, 5m or 2h, not "
        "'0'");
  CHECK(refused({"--rank", "none"}) ==
        "--rank must be auto or a whole number from 0 to 1023, not 'none'");
  CHECK(refused({"--insecure", "yes"}) == "unexpected argument 'yes': --insecure takes no value");
  CHECK(refused({"file.txt"}) == "unexpected argument 'file.txt': every option begins with --");
  CHECK(refused({"-x=3"}) == "unknown option -x");
  CHECK(refused({"-q=3"}) == "--quiet takes no value");
  CHECK(refused({"--=3"}) == "unknown option --");
  CHECK(refused({"-tower", "deep"}) == "unknown option -tower; did you mean --tower?");
  for (const std::vector<std::string>& args : std::vector<std::vector<std::string>>{
           {"file", "-q"}, {"-q", "file"}, {"--tower", "deep", "file"}}) {
    std::vector<std::string> operands;
    parse_options(table, args, &operands);
    CHECK(operands == std::vector<std::string>{"file"});
    CHECK_THROWS(parse_options(table, {"file", "more"}, &operands));
  }
  const ParsedOptions options =
      parse_options(table, {"-q", "--tower", "wide", "--tower=deep", "--rows_per_rank", "3"});
  CHECK(options.flag("quiet"));
  CHECK(options.text("tower") == "deep");
  CHECK(options.integer("rows-per-rank") == 3);
}

TEST_CASE("completions quote characters that are special to the shell") {
  CHECK(has(completion(kShop, "zsh"), "'--rows-per-rank[rows [of a table\\]]:value: '"));
  CHECK(has(completion(kShop, "zsh"), "'--clicks[the user'\\''s data]:value:_files'"));
  CHECK(has(completion(kShop, "fish"), "-r -F -l clicks -d 'the user\\'s data'"));
  CHECK(has(completion(kShop, "bash"),
            "clicks/--tower)\n      mapfile -t COMPREPLY < <(compgen -W 'deep wide'"));
}

TEST_CASE("a program with one job needs no command name") {
  CHECK(has(
      help_text(kShop, kCommands[0]),
      "Usage: shop [OPTION]...\n       shop report|help|man|completion|schema\n\nTwo towers.\n\n"));
  CHECK(has(completion(kShop, "zsh"), "  $clicks_options \\\n"));
  CHECK_FALSE(has(completion(kShop, "fish"), "__fish_seen_subcommand_from clicks"));
}

TEST_CASE("the schema is closed and lists the fields that are always present") {
  const Json step = schema_of("step");
  REQUIRE(step.size() == 1);
  CHECK(step[0]["additionalProperties"] == false);
  CHECK(step[0]["properties"]["cmd"]["enum"] == Json::array({"clicks"}));
  CHECK(step[0]["properties"]["clicks_per_s"]["type"] == Json::array({"number", "null"}));
  CHECK(has(step[0]["required"].dump(), "clicks_per_s"));
  const Json end = schema_of("end");
  REQUIRE(end.size() == 2);  // for errors before the command is known, and for the job
  CHECK(end[0]["properties"]["cmd"]["enum"] == Json::array({nullptr}));
  CHECK_FALSE(end[0]["properties"].contains("auc"));
  CHECK(schema_of("rank_end")[0]["properties"].contains("auc"));
  CHECK_FALSE(has(end[1]["required"].dump(), "auc"));
  const Json start = schema_of("start")[0]["properties"]["config"];
  CHECK(start["additionalProperties"] == false);
  CHECK(start["properties"]["rows_per_rank"]["type"] == Json::array({"integer", "null"}));
  CHECK_FALSE(start["properties"].contains("rank"));  // --rank is no option of the job
}

TEST_CASE("an undeclared line is refused") {
  const std::vector<job::Event> events = events_of(kCommands[0]);
  const Json good{{"epoch", 1}, {"step", 1}, {"loss", nullptr}, {"lr", 0.1}, {"clicks_per_s", 2.5}};
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

TEST_CASE("a default checkpoint folder can be disabled") {
  job::Option folder{.name = "checkpoint", .initial = "own"};
  CHECK_THROWS_WITH(canonical_value(folder, "", "--checkpoint"), "--checkpoint needs a value: ");
  folder.may_be_empty = true;
  CHECK(canonical_value(folder, "", "--checkpoint").empty());
  const job::OptionTable table = {folder};
  CHECK(job::ParsedOptions(table).adopting({{"checkpoint", ""}}).text("checkpoint").empty());
  folder.initial = "";  // an empty default, for example from an unset variable, cannot be disabled
  CHECK_THROWS_WITH(canonical_value(folder, "", "--checkpoint"), "--checkpoint needs a value: ");
}

namespace {

struct Saving : job::TrainerOptions {
  Saving() { checkpoint.dir = "saves_of_this_job"; }
  static void describe(job::OptionList<Saving>&) {}
};

}  // namespace

TEST_CASE("a job's own default checkpoint folder counts as a folder that the user gave") {
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

TEST_CASE("--log-interval is a number of steps or auto") {
  job::OptionList<Saving> list;
  job::describe_inherited(list);
  const job::OptionTable table = list.table();
  const auto read = [&](const std::vector<std::string>& args) {
    return list.read(parse_options(table, args)).log_interval;
  };
  CHECK_FALSE(read({}));
  CHECK(read({"--log-interval", "7"}) == 7);
  CHECK(read({"--log-interval", "0"}) == 0);
  CHECK_FALSE(read({"--log-interval", "7", "--log-interval", "auto"}));
  CHECK(list.write(Saving()).at("log-interval") == "auto");
  CHECK_THROWS_WITH(read({"--log-interval", "-1"}),
                    "--log-interval must be auto or a whole number from 0 to 2147483647, not '-1'");
}

TEST_CASE("the end line sums the updates of all ranks") {
  Summary summary;
  summary.add({{"updates", 3}, {"loss", 0.5}});
  summary.add({{"steps", 2}});
  summary.add({{"updates", 4}, {"loss", 0.25}});
  const Json fields = summary.end_fields("job", base::Clock::now(), std::nullopt);
  CHECK(fields["scope"] == "job");
  CHECK(fields["updates"] == 7);
  CHECK(fields["loss"] == 0.5);
}

TEST_CASE("values that a rank derived from its own options are replaced by those of rank 0") {
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
