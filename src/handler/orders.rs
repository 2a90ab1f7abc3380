//! The built-in handler: it records every order in the table `orders`, as it is.

use async_trait::async_trait;

use crate::handler::{Failure, Handler, Order};
use crate::model::delivery::Delivery;
use crate::store::Tx;

/// Keeps subject, position, time and payload of each order byte for byte; it neither parses nor judges them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Orders;

#[async_trait]
impl Handler for Orders {
    async fn apply(&self, tx: &mut Tx<'_>, orders: &[Order<'_>]) -> Result<(), Failure> {
        let deliveries: Vec<&Delivery> = orders.iter().map(|order| order.delivery).collect();
        tx.record_orders(&deliveries).await?;
        Ok(())
    }
}
