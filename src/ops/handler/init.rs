//! `handler init`: writes an example that can be checked and run.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use crate::ops::new_file::NewFile;

/// What the example shows.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ExampleKind {
    /// Statements in your own tables
    Sql,
    /// A call of your own service
    Http,
}

#[derive(Debug, Args)]
pub struct HandlerInitArgs {
    /// What an order does in the example
    kind: ExampleKind,
    /// The folder, created if it does not exist; no file in it is replaced
    folder: PathBuf,
}

pub fn init(args: &HandlerInitArgs, out: &mut impl Write) -> io::Result<()> {
    let files: &[(&str, &str)] = match args.kind {
        ExampleKind::Sql => &[
            ("handler.toml", include_str!("sql.toml")),
            ("migrations/0001_shop.sql", include_str!("shop.sql")),
            ("order.json", include_str!("order.json")),
        ],
        ExampleKind::Http => &[("handler.toml", include_str!("http.toml")), ("order.json", include_str!("order.json"))],
    };
    let taken = files.iter().map(|(name, _)| args.folder.join(name)).find(|path| path.symlink_metadata().is_ok());
    if let Some(path) = taken {
        let text = format!("{} exists already; choose another folder", path.display());
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
    }
    for (name, text) in files {
        let path = args.folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
        let file = NewFile::create(&path)?;
        std::fs::write(file.partial(), text)?;
        file.keep()?;
        writeln!(out, "wrote {}", path.display())?;
    }
    let shown = args.folder.join("handler.toml");
    writeln!(out, "next: order-processor handler check {}", shown.display())
}
