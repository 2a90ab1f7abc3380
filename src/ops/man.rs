//! `man`: the manual page. Commands and options come from the flags' own definition, the rest from `man.roff`.

use std::io::{self, Write};

use clap::Command;
use clap_mangen::Man;

/// The sections that no definition of a flag knows.
const SECTIONS: &str = include_str!("man.roff");

pub fn run(command: Command, out: &mut impl Write) -> io::Result<()> {
    let man = Man::new(command.clone());
    let mut page = Vec::new();
    // Not the generator's own: it leaves the empty date out, and the version then stands in its place (clap_mangen 0.3.3).
    let (name, version) = (command.get_name(), command.get_version().unwrap_or_default());
    writeln!(page, ".TH \"{}\" \"1\" \"\" \"{name} {version}\"", name.to_uppercase())?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    writeln!(page, ".SH COMMANDS")?;
    describe(&mut page, command.get_name(), &command)?;
    page.extend_from_slice(SECTIONS.as_bytes());
    out.write_all(&page)
}

/// One subsection for each command that can be given, those below another one included.
fn describe(page: &mut Vec<u8>, path: &str, parent: &Command) -> io::Result<()> {
    for command in parent.get_subcommands().filter(|command| !command.is_hide_set()) {
        let path = format!("{path} {}", command.get_name());
        if command.has_subcommands() {
            describe(page, &path, command)?;
            continue;
        }
        let man = Man::new(command.clone().disable_help_flag(true).bin_name(&path));
        writeln!(page, ".SS \"{}\"", path.trim_start_matches("order-processor "))?;
        body(page, |page| man.render_synopsis_section(page))?;
        page.extend_from_slice(b".PP\n");
        body(page, |page| man.render_description_section(page))?;
        body(page, |page| man.render_options_section(page))?;
    }
    Ok(())
}

/// What `section` renders without its own heading, and without the definitions that each page begins with.
fn body(page: &mut Vec<u8>, section: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> io::Result<()> {
    let mut rendered = Vec::new();
    section(&mut rendered)?;
    // Possible values begin with two line breaks and nothing between them, which mandoc warns of.
    let rendered = String::from_utf8_lossy(&rendered).replace("\n.br\n\n.br\n", "\n.br\n");
    for line in rendered.split_inclusive('\n') {
        if ![".SH ", ".ie ", ".el "].iter().any(|unwanted| line.starts_with(unwanted)) {
            page.extend_from_slice(line.as_bytes());
        }
    }
    Ok(())
}
