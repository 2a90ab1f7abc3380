//! `sqlx::migrate!` embeds the folder at compile time, and cargo does not know that it looked there.
fn main() {
    println!("cargo::rerun-if-changed=migrations");
}
