//! The command line `eda`: runs the rules on tensor files, lists adapters, and checks them.

mod adapters;
mod bench;
mod chart;
mod check;
mod compare;
mod progress;
mod report;
mod run;
mod table;

use clap::{Parser, Subcommand, ValueEnum};
use eda_wgpu::file::OutputFile;
use eda_wgpu::{Backend, Element, Error, Tier};
use etcetera::BaseStrategy;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Erase-then-Delta Attention and its family of linear-attention rules on any GPU.
///
/// Runs on a discrete GPU, else an integrated one, else the CPU engine, and says which it was.
#[derive(Debug, Parser)]
#[command(name = "eda", version, arg_required_else_help = true)]
#[command(after_help = "\
Examples:
  eda run layer.safetensors -o out.safetensors   run a layer's inputs, write o and final_state
  eda run layer.safetensors                      compare with the expected_… tensors in the file
  eda run layer.safetensors --mode recurrent     the same by the float64 reference
  eda adapters                                   what is there, and what it gets
  eda check                                      is this machine right? (paste it into a bug report)
  eda bench --json mine.json                     how fast is it, against its own memory and arithmetic?
  eda bench compare theirs.json mine.json        and against another

Exit status:
  0  done
  1  a check failed, or the device did (lost, out of memory, wrong in its self-test, none found)
  2  bad input or usage; one line on stderr says what was expected and what was found")]
struct Cli {
    /// Build every pipeline anew and keep none. Otherwise they are kept in the user's cache directory, where
    /// the driver can. EDA_NO_CACHE=1 in the environment does the same.
    #[arg(long, global = true)]
    no_cache: bool,
    #[command(subcommand)]
    command: Command,
}

impl Cli {
    /// Where pipelines are kept between runs.
    fn pipeline_cache(&self) -> Option<PathBuf> {
        let off = |value: std::ffi::OsString| !value.is_empty() && value != "0";
        if self.no_cache || std::env::var_os("EDA_NO_CACHE").is_some_and(off) {
            return None;
        }
        // Without a home directory nothing is kept.
        let directories = etcetera::choose_base_strategy().ok()?;
        Some(directories.cache_dir().join("eda-wgpu").join("pipelines"))
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the adapters: limits, tiers and element types.
    Adapters(adapters::Args),
    /// Run a safetensors file through a rule.
    Run(run::Args),
    /// Compare every adapter and the CPU engine with float64 on built-in cases.
    Check(check::Args),
    /// Time prefill and decode, against the adapter's own memory and arithmetic; compare such runs.
    Bench(bench::Args),
}

/// `--backend`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackendName {
    /// A discrete GPU, else an integrated one, else the CPU engine.
    Auto,
    /// The CPU engine.
    Cpu,
    Vulkan,
    Metal,
    /// Direct3D 12.
    Dx12,
    /// OpenGL (ES).
    Gl,
}

impl From<BackendName> for Backend {
    fn from(name: BackendName) -> Self {
        match name {
            BackendName::Auto => Self::Auto,
            BackendName::Cpu => Self::Cpu,
            BackendName::Vulkan => Self::Vulkan,
            BackendName::Metal => Self::Metal,
            BackendName::Dx12 => Self::Dx12,
            BackendName::Gl => Self::Gl,
        }
    }
}

/// `--tier`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TierName {
    /// The best for the adapter.
    Auto,
    /// float32 within the WebGPU default limits; runs everywhere.
    Portable,
    /// Matrix units with float16 operands; `auto` takes it for --dtype f16 where the adapter has them.
    Matrix,
}

impl From<TierName> for Option<Tier> {
    fn from(name: TierName) -> Self {
        match name {
            TierName::Auto => None,
            TierName::Portable => Some(Tier::Portable),
            TierName::Matrix => Some(Tier::Matrix),
        }
    }
}

/// `--dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Dtype {
    F32,
    /// Needs an adapter with 16-bit floats.
    F16,
}

impl From<Dtype> for Element {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
        }
    }
}

/// Why a command did not succeed.
#[derive(Debug)]
enum Failure {
    /// Flags that contradict each other.
    Usage(String),
    /// An error of the library, about the file where there is one.
    Library { file: Option<PathBuf>, error: Error },
    /// Standard output cannot be written to.
    Stdout(std::io::Error),
    /// `eda check` found a wrong result, and has said so.
    CheckFailed,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Library { file: None, error }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Stdout(error)
    }
}

impl Failure {
    /// Reports on stderr, in one line; returns the exit status.
    fn report(self) -> u8 {
        let (line, status) = match self {
            Self::Usage(message) => (message, 2),
            Self::Library { file, error } => {
                let status = match error {
                    Error::Tensor { .. } | Error::File { .. } | Error::Unsupported { .. } => 2,
                    _ => 1,
                };
                match (&error, file) {
                    // These name their file themselves.
                    (Error::File { .. }, _) | (_, None) => (error.to_string(), status),
                    (_, Some(file)) => (format!("{}: {error}", file.display()), status),
                }
            }
            // Whoever read the output has seen enough (`eda … | head`).
            Self::Stdout(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return 0,
            Self::Stdout(e) => (format!("standard output: {e}"), 2),
            Self::CheckFailed => return 1,
        };
        say(&line);
        status
    }
}

/// One line on stderr, whatever a path or an adapter's name contains.
fn say(message: &str) {
    let line = table::printable(message);
    // With stderr gone there is nobody to tell.
    let _ = writeln!(std::io::stderr(), "eda: {line}");
}

fn main() -> ExitCode {
    if cfg!(target_os = "linux") && std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        // Mesa's device-select layer asks Wayland for the default device, and complains on stderr where there
        // is no desktop session. This program chooses the device itself.
        // SAFETY: the first thing that main does; no other thread exists yet.
        unsafe { std::env::set_var("NODEVICE_SELECT", "1") };
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return ExitCode::from(usage(&e)),
    };
    let result = match &cli.command {
        Command::Adapters(args) => adapters::adapters(args),
        Command::Run(args) => run::run(args, cli.pipeline_cache()),
        Command::Check(args) => check::check(args, cli.pipeline_cache()),
        Command::Bench(args) => bench::bench(args, cli.pipeline_cache()),
    };
    ExitCode::from(result.map_or_else(Failure::report, |()| 0))
}

/// Prints help, or what is wrong with the command line in one line as for every other bad input.
fn usage(error: &clap::Error) -> u8 {
    use clap::error::ErrorKind;
    if matches!(
        error.kind(),
        ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    ) {
        // Help that nobody can read is no failure.
        let _ = error.print();
        return u8::from(error.use_stderr()) * 2;
    }
    let text = error.to_string();
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .take_while(|l| !l.starts_with("Usage:") && !l.starts_with("For more information"))
        .filter(|l| !l.is_empty())
        .collect();
    let message = lines.join(" ");
    say(&format!(
        "{} (see eda --help)",
        message.strip_prefix("error: ").unwrap_or(&message)
    ));
    2
}

/// Writes text to standard output.
fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(())
}

/// Writes a value to standard output as one line of JSON.
fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let mut line = serde_json::to_string(value).map_err(std::io::Error::from)?;
    line.push('\n');
    print(&line)
}

/// An output file, tried out before any work, which a target that cannot be written to would waste; refuses one that
/// is an input.
fn output_file<'a>(
    path: Option<&Path>,
    mut inputs: impl Iterator<Item = &'a Path>,
) -> Result<Option<OutputFile>, Failure> {
    let Some(path) = path else {
        return Ok(None);
    };
    if let Ok(target) = path.canonicalize()
        && inputs.any(|input| input.canonicalize().is_ok_and(|input| input == target))
    {
        return Err(Failure::Usage(format!(
            "{}: expected an output other than the input, found the input",
            path.display()
        )));
    }
    Ok(Some(OutputFile::create(path)?))
}

/// Whether stderr is watched by a person.
fn watched() -> bool {
    std::io::stderr().is_terminal()
}
