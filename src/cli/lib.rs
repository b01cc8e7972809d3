//! The command line: one file per command. Results go to stdout, progress and logs to stderr.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod accounts;
mod admin;
mod applications;
mod backup;
#[cfg(feature = "bench")]
mod bench;
mod chat;
mod config;
mod connect;
mod credits;
mod doctor;
mod goldens;
mod init;
mod keys;
mod launch;
mod ledger;
mod metrics;
mod models;
mod nodes;
mod package;
#[cfg(feature = "prover")]
mod qualify;
mod quickstart;
mod receipts;
#[cfg(feature = "gateway")]
mod relay;
mod reload;
#[cfg(feature = "prover")]
mod requalify;
mod requests;
mod run;
mod serve;
mod service;
mod status;
mod support;
mod upgrade;
#[cfg(not(all(feature = "bench", feature = "gateway", feature = "prover")))]
mod without;

use clap::{CommandFactory, Parser, Subcommand};
use cresset_base::built_at;
use ledger::LedgerCommand;
use models::ModelsCommand;
use rustix::fs::Mode;
use std::env::consts::{ARCH, OS};
use std::process::ExitCode;
use std::sync::{LazyLock, OnceLock};
use support::context::{Context, Globals};
use support::logging;
use support::output::{self, CommandError, CommandResult, Output};
#[cfg(not(feature = "bench"))]
use without::bench;
#[cfg(not(feature = "prover"))]
use without::qualify;
#[cfg(not(feature = "gateway"))]
use without::relay;

const EXAMPLES: &str = "Examples:
  cresset quickstart                                   from nothing to an answer, then keep serving
  cresset run OWNER/REPOSITORY:Q4_K_M                  ask a model of the hub
  cresset init && cresset serve                        a node on a data folder of its own
  cresset accounts create --name acme --trial 5_000_000
  cresset keys create --account ID --expires-in 30d
  cresset status --watch

Amounts are microcredits; 1 000 000 of them are one credit.
Every command prints JSON with --json, and works whether or not a node is running on the data folder.
Exit codes: 0 done, 1 failed, 2 wrong usage; `cresset qualify --help` lists its own.";

/// The version, the date of its sources, and what it was built for.
fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| {
        let date = built_at().to_string();
        let (day, _) = date.split_once(' ').unwrap_or((&date, ""));
        format!("{} (sources of {day}, {OS} {ARCH})", env!("CARGO_PKG_VERSION"))
    });
    &VERSION
}

/// Serve language models on your own hardware, every token accounted for.
#[derive(Debug, Parser)]
#[command(
    name = "cresset",
    version = version(),
    after_help = EXAMPLES,
    max_term_width = 110,
    arg_required_else_help = true
)]
struct Cli {
    #[command(flatten)]
    globals: Globals,
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Debug, Subcommand)]
enum CliCommand {
    /// Go from nothing to an answer: model, account, key, qualification, node
    Quickstart(quickstart::Arguments),
    /// Fetch, prove and serve a model, and ask it
    Run(run::Arguments),
    /// Run the node
    Serve(serve::Arguments),
    /// Have another program take the place of the running node, without refusing a request
    Upgrade(upgrade::Arguments),
    /// Have the running node take over changed models, prices and plans
    Reload,
    /// Talk to a model in the terminal
    Chat(chat::Arguments),
    /// Measure a node under load, or the ledger
    Bench(bench::Arguments),
    /// Show the state of the node, its models and its load
    Status(status::Arguments),
    /// Write what a monitoring system shows and watches
    #[command(subcommand)]
    Metrics(metrics::MetricsCommand),
    /// Write the units of a service manager that run the node and back it up
    #[command(subcommand)]
    Service(service::ServiceCommand),
    /// Write this program into a folder, with a script that installs it on other machines
    Package(package::Arguments),
    /// Look for problems on this machine, and say how to mend them
    Doctor,
    /// Make a data folder with an empty ledger, in it or in a database
    Init(init::Arguments),
    /// Create, list, change, limit, suspend and close accounts
    #[command(subcommand)]
    Accounts(accounts::AccountsCommand),
    /// Create, list, limit, rotate and revoke API keys
    #[command(subcommand)]
    Keys(keys::KeysCommand),
    /// Create applications, and issue and revoke their tokens
    #[command(subcommand)]
    Applications(applications::ApplicationsCommand),
    /// Grant and debit credits, show balances and statements
    #[command(subcommand)]
    Credits(credits::CreditsCommand),
    /// List, show, cancel and unblock requests
    #[command(subcommand)]
    Requests(requests::RequestsCommand),
    /// List the nodes that share a ledger in a database
    Nodes,
    /// Say who may give commands from other machines, and show what operators did
    #[command(subcommand)]
    Admin(admin::AdminSubcommand),
    /// Check receipts of completed requests
    #[command(subcommand)]
    Receipts(receipts::ReceiptsCommand),
    /// Copy everything of this node but its weights to one file, also while it runs
    Backup(backup::BackupArguments),
    /// Put a node's backup in place; no node may run on the data folder
    Restore(backup::RestoreArguments),
    /// Audit, back up, restore and move the ledger alone
    #[command(subcommand)]
    Ledger(LedgerCommand),
    /// Fetch, add, list and remove model releases
    #[command(subcommand)]
    Models(models::ModelsCommand),
    /// Prove a release on this machine: only qualified releases are served
    Qualify(qualify::Arguments),
    /// Make, import and list reference outputs that releases are compared with
    #[command(subcommand)]
    Goldens(goldens::GoldensCommand),
    /// Show, check and describe the configuration
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Open a gateway beside a client: OpenAI's, Anthropic's and Ollama's interfaces to a node
    Relay(relay::Arguments),
    /// Print what a tool has to be told so that it asks the node
    Connect(connect::Arguments),
    /// Start a coding agent or a chat window with a key that has a budget; say what it cost
    Launch(launch::Arguments),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    #[command(flatten)]
    Peer(PeerCommand),
}

/// The words that other programs have for commands of this one.
#[derive(Debug, Subcommand)]
enum PeerCommand {
    /// The same as `cresset models pull`
    #[command(hide = true)]
    Pull {
        /// As `cresset models pull` takes it
        #[arg(value_name = "NAME")]
        release: String,
    },
    /// The same as `cresset models list`
    #[command(hide = true, alias = "ls")]
    List,
    /// The same as `cresset status`
    #[command(hide = true)]
    Ps(status::Arguments),
    /// The same as `cresset models show`
    #[command(hide = true)]
    Show {
        /// The release, by name or id
        #[arg(value_name = "NAME")]
        release: String,
    },
    /// The same as `cresset models unload`
    #[command(hide = true)]
    Stop {
        /// The model, by name or id
        #[arg(value_name = "NAME")]
        release: String,
    },
    /// The same as `cresset models remove`
    #[command(hide = true)]
    Rm {
        /// The release, by name or id
        #[arg(value_name = "NAME")]
        release: String,
    },
}

impl PeerCommand {
    fn meant(self) -> CliCommand {
        CliCommand::Models(match self {
            Self::Pull { release } => ModelsCommand::Pull { release },
            Self::List => ModelsCommand::List,
            Self::Ps(arguments) => return CliCommand::Status(arguments),
            Self::Show { release } => ModelsCommand::Show { release },
            Self::Stop { release } => ModelsCommand::Unload { release },
            Self::Rm { release } => ModelsCommand::Remove { release },
        })
    }
}

impl CliCommand {
    /// Whether the command only asks a node, so that it may be on another machine.
    fn is_for_any_node(&self) -> bool {
        matches!(
            self,
            Self::Reload
                | Self::Status(_)
                | Self::Accounts(_)
                | Self::Keys(_)
                | Self::Applications(_)
                | Self::Credits(_)
                | Self::Requests(_)
                | Self::Nodes
                | Self::Admin(_)
                | Self::Ledger(LedgerCommand::Audit)
                | Self::Models(
                    ModelsCommand::Load { .. }
                        | ModelsCommand::Unload { .. }
                        | ModelsCommand::Price(_)
                )
        )
    }
}

/// The file mode mask that this program was started with, for the programs that it starts.
static FORMER_MASK: OnceLock<Mode> = OnceLock::new();

/// Parses the command line, runs the command, and turns what happened into an exit code.
pub fn main() -> ExitCode {
    let _armed = cresset_base::failpoint::arm();
    // What the node writes is its owner's alone, whatever mask the process was started with.
    let former = rustix::process::umask(Mode::RWXG | Mode::RWXO);
    FORMER_MASK.get_or_init(|| former);
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse_usage(&error),
    };
    let output = Output { json: cli.globals.json };
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => output.fail(&failure),
    }
}

/// Prints a usage error in clap's own text and colours. With `--json`, stdout gets a document too.
fn refuse_usage(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    if error.use_stderr() && std::env::args().any(|argument| argument == "--json") {
        let message = error.render().to_string();
        let _ = output::print(&format!(
            "{:#}\n",
            serde_json::json!({ "error": { "message": message.trim_end() } })
        ));
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

fn run(cli: Cli) -> CommandResult {
    if let CliCommand::Completions { shell } = cli.command {
        return completions(Output { json: cli.globals.json }, shell);
    }
    let Cli { globals, command } = cli;
    let command = match command {
        CliCommand::Peer(command) => command.meant(),
        command => command,
    };
    if let CliCommand::Qualify(arguments) = &command {
        arguments.lower_priority();
    }
    let runtime = tokio::runtime::Runtime::new()?;
    let result = runtime.block_on(dispatch(globals, command));
    // A blocking task may still be tokenising or loading after an interrupt; it is not waited for.
    runtime.shutdown_background();
    result
}

async fn dispatch(globals: Globals, command: CliCommand) -> CommandResult {
    if let CliCommand::Config(settings) = command {
        return config::run(&globals, &settings);
    }
    if let CliCommand::Doctor = command {
        return doctor::run(&globals).await;
    }
    let (flags, attended) = match &command {
        CliCommand::Serve(arguments) => (arguments.overrides(), false),
        CliCommand::Init(arguments) => (arguments.overrides(), true),
        CliCommand::Ledger(LedgerCommand::Move(arguments)) => (arguments.overrides(), true),
        CliCommand::Relay(_) => (Vec::new(), false),
        _ => (Vec::new(), true),
    };
    let context = Context::load(&globals, &flags, attended)?;
    if context.remote.is_some() && !command.is_for_any_node() {
        let what = "this command works on the data folder itself, not with --node";
        return Err(CommandError::new(what).remedy("run it on the node's machine"));
    }
    logging::start(&context.config.log)?;
    match command {
        CliCommand::Quickstart(arguments) => Box::pin(quickstart::run(context, arguments)).await,
        CliCommand::Run(arguments) => Box::pin(run::run(context, arguments)).await,
        CliCommand::Serve(arguments) => serve::run(context, arguments).await,
        CliCommand::Upgrade(arguments) => upgrade::run(&context, arguments).await,
        CliCommand::Reload => reload::run(&context).await,
        CliCommand::Chat(arguments) => Box::pin(chat::run(context, arguments)).await,
        CliCommand::Bench(arguments) => Box::pin(bench::run(context, arguments)).await,
        CliCommand::Status(arguments) => status::run(&context, &arguments).await,
        CliCommand::Metrics(command) => metrics::run(&context, command),
        CliCommand::Service(command) => service::run(&context, command),
        CliCommand::Package(arguments) => package::run(&context, &arguments),
        CliCommand::Init(arguments) => init::run(&context, &globals, &arguments),
        CliCommand::Accounts(command) => accounts::run(&context, command).await,
        CliCommand::Keys(command) => keys::run(&context, command).await,
        CliCommand::Applications(command) => applications::run(&context, command).await,
        CliCommand::Credits(command) => credits::run(&context, command).await,
        CliCommand::Requests(command) => requests::run(&context, command).await,
        CliCommand::Nodes => nodes::run(&context).await,
        CliCommand::Admin(command) => admin::run(&context, command).await,
        CliCommand::Receipts(command) => receipts::run(&context, command).await,
        CliCommand::Backup(arguments) => backup::backup(&context, &globals, &arguments).await,
        CliCommand::Restore(arguments) => backup::restore(&context, &arguments).await,
        CliCommand::Ledger(command) => ledger::run(&context, &globals, command).await,
        CliCommand::Models(command) => models::run(&context, command).await,
        CliCommand::Qualify(arguments) => qualify::run(&context, arguments).await,
        CliCommand::Goldens(command) => goldens::run(&context, command).await,
        CliCommand::Relay(arguments) => relay::run(&context, arguments).await,
        CliCommand::Connect(arguments) => connect::run(&context, arguments).await,
        CliCommand::Launch(arguments) => Box::pin(launch::run(&context, arguments)).await,
        CliCommand::Config(_)
        | CliCommand::Doctor
        | CliCommand::Completions { .. }
        | CliCommand::Peer(_) => {
            unreachable!("invariant: handled before a context is loaded")
        }
    }
}

fn completions(output: Output, shell: clap_complete::Shell) -> CommandResult {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "cresset", &mut script);
    let script = String::from_utf8_lossy(&script);
    let document = serde_json::json!({ "shell": shell.to_string(), "script": script });
    output.result(&document, |_| script.clone().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_tree_is_sound() {
        Cli::command().debug_assert();
    }

    /// Help is 100 columns wide. A longer line is wrapped, so it has to be a whole paragraph: the
    /// rest of a part of one would stand alone above the next part.
    #[test]
    fn help_is_not_broken_within_a_paragraph() {
        fn check(command: &clap::Command) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            for line in help.lines().filter(|line| line.chars().count() > 100) {
                let is_whole = line.ends_with('.') && !line.starts_with(' ');
                assert!(is_whole, "{}: {line}", command.get_name());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }

    #[test]
    fn every_command_and_argument_is_described() {
        fn check(command: &clap::Command) {
            assert!(command.get_about().is_some(), "{} has no description", command.get_name());
            for argument in command.get_arguments() {
                assert!(
                    argument.get_help().is_some(),
                    "{argument} of {} has no description",
                    command.get_name()
                );
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }
}
