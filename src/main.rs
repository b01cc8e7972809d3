//! The `cresset` command.

fn main() -> std::process::ExitCode {
    cresset_cli::main()
}
