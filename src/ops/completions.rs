//! `completions`: what a shell has to source to complete our commands and options.

use std::io::{self, Write};

use clap::{Args, Command, ValueEnum};
use clap_complete::generate;

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell to write them for: bash, zsh or fish
    #[arg(hide_possible_values = true)]
    shell: Shell,
}

/// Those that the package installs them for.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

pub fn run(mut command: Command, args: &CompletionsArgs, out: &mut impl Write) -> io::Result<()> {
    let name = command.get_name().to_owned();
    // The generator takes a failed write for a bug, so it gets memory to write to.
    let mut script = Vec::new();
    match args.shell {
        Shell::Bash => {
            generate(clap_complete::Shell::Bash, &mut command, name, &mut script);
            script = with_hyphens_mended(&command, &String::from_utf8_lossy(&script)).into_bytes();
        }
        Shell::Zsh => generate(clap_complete::Shell::Zsh, &mut command, name, &mut script),
        Shell::Fish => generate(clap_complete::Shell::Fish, &mut command, name, &mut script),
    }
    out.write_all(&script)
}

/// In one place the generator takes the hyphen of a command's name for the step to a subcommand, and then nothing below that
/// command is completed (seen with clap_complete 4.6.12).
fn with_hyphens_mended(command: &Command, script: &str) -> String {
    let name = command.get_name();
    let mended = script.replace(&name.replace('-', "__subcmd__"), &name.replace('-', "__"));
    command.get_subcommands().fold(mended, |script, command| with_hyphens_mended(command, &script))
}
