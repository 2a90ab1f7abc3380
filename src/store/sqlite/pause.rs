//! The marker beside the database that makes the daemon close the database, `<database>.paused`.
//!
//! It is a file and not a row: the pause must last while the database is removed for service, and over restarts of the daemon and of
//! the machine.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::open::{beside, folder, give_to_owner, unseen};
use crate::store::{OpenError, Pause};

/// How often the daemon looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The marker that belongs to a database.
fn marker(database: &Path) -> PathBuf {
    beside(database, ".paused")
}

/// The pause, if there is one. A marker that cannot be read is a pause too.
pub fn read(database: &Path) -> Result<Option<Pause>, OpenError> {
    let path = marker(database);
    match std::fs::read(&path) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes).unwrap_or_default())),
        // If the folder is not mounted, for example during service of its disk, the marker is missing. That does not end the pause.
        Err(error) if error.kind() == io::ErrorKind::NotFound && !folder(database).is_dir() => {
            Err(OpenError::MissingFolder(folder(database).to_owned()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // The marker of another user. In a folder that this user cannot enter, the marker would not be visible.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && path.symlink_metadata().is_ok() => {
            Ok(Some(Pause::default()))
        }
        Err(error) => Err(unseen(&path, error)),
    }
}

/// Looks once a second. Returns when there is a pause.
pub async fn begins(database: &Path) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        if matches!(read(database), Ok(Some(_))) {
            return;
        }
    }
}

/// Creates the marker, so that it survives a power cut. `false` if there is one already.
pub fn begin(database: &Path, pause: &Pause) -> Result<bool, OpenError> {
    let path = marker(database);
    let written = match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
        Err(error) => Err(error),
        Ok(file) => write(file, &path, database, pause).inspect_err(|_| {
            // An incomplete marker is a pause, and this error reports that there is none.
            drop(std::fs::remove_file(&path));
        }),
    };
    written.map(|()| true).map_err(|source| OpenError::Marker { doing: "write", path, source })
}

fn write(mut file: File, path: &Path, database: &Path, pause: &Pause) -> io::Result<()> {
    file.write_all(serde_json::to_string(pause)?.as_bytes())?;
    file.write_all(b"\n")?;
    // Root may pause a daemon of another user, and this user must be able to read the reason.
    give_to_owner(path, database);
    file.sync_all()?;
    File::open(folder(path))?.sync_all()
}

/// Deletes the marker. `false` if there is none.
pub fn end(database: &Path) -> Result<bool, OpenError> {
    let path = marker(database);
    let removed = match std::fs::remove_file(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => Err(error),
        Ok(()) => File::open(folder(&path)).and_then(|folder| folder.sync_all()),
    };
    removed.map(|()| true).map_err(|source| OpenError::Marker { doing: "remove", path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_on_from_its_marker_to_its_end_and_also_if_the_marker_is_garbled() {
        let folder = tempfile::tempdir().unwrap();
        let database = folder.path().join("x.db");
        assert_eq!(read(&database).unwrap(), None);
        let pause = Pause { by: "ops@db1".into(), at: "2026-11-29T21:00:00Z".into(), reason: Some("new disk".into()) };
        assert!(begin(&database, &pause).unwrap());
        assert_eq!(read(&database).unwrap(), Some(pause.clone()));
        assert_eq!(pause.to_string(), "by ops@db1 since 2026-11-29T21:00:00Z: new disk");
        assert!(!begin(&database, &pause).unwrap());
        std::fs::write(marker(&database), "{").unwrap();
        assert_eq!(read(&database).unwrap().unwrap().to_string(), "by a marker that cannot be read");
        assert!(end(&database).unwrap());
        assert_eq!(read(&database).unwrap(), None);
        assert!(!end(&database).unwrap());
    }
}
