//! The `cresset` command.

fn main() -> std::process::ExitCode {
    cresset::cli::main()
}
